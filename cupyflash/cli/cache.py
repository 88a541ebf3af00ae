"""``cache``: where compiled kernels are, how much they take, and an end to them."""

from __future__ import annotations

import argparse
from typing import Any

from cupyflash.runtime.cubin_cache import cubin_cache

from .terminal import print_pairs

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("cache", help="compiled kernels: where, how many, clear")
    parser.add_argument(
        "what", nargs="?", choices=("show", "where", "size", "clear"), default="show",
        help="show = folder, kernels and bytes; where, size = one of them alone, for scripts",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show or clear the folder that ``CUPYFLASH_CACHE_DIR`` names, or the user's own."""
    found = cubin_cache()
    files = found.files()
    nbytes = sum(path.stat().st_size for path in files)
    if options.what == "where":
        print(found.folder)
    elif options.what == "size":
        print(nbytes)
    elif options.what == "clear":
        print(f"removed {found.clear()} kernels, {nbytes / 1e6:.1f} MB, from {found.folder}")
    else:
        print_pairs(
            [
                ("folder", str(found.folder)),
                ("kernels", str(len(files))),
                ("size", f"{nbytes / 1e6:.1f} MB"),
            ]
        )
    return 0
