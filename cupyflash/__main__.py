"""Command line: ``python -m cupyflash bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .bench import bench_cases, header, run_bench, table
from .bench.peers import PEERS
from .runtime.kernel_source import kernel_root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cupyflash", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="time the standard cases on this GPU")
    bench.add_argument("--only", default="", help="comma-separated parts of case names")
    bench.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)}")
    bench.add_argument("--peers-folder", type=Path, help="folder with fa3.so, flashmla.so")
    bench.add_argument("--json", type=Path, help="write header and rows here")
    bench.add_argument("--list", action="store_true", help="name the cases and stop")
    return _bench(parser.parse_args(arguments))


def _bench(options: argparse.Namespace) -> int:
    if options.list:
        print("\n".join(case.name for case in bench_cases(options.only)))
        return 0
    try:
        import cupy
    except ImportError:
        print("bench needs a GPU and CuPy: pip install 'cupyflash[cuda13]'", file=sys.stderr)
        return 2
    if not cupy.is_available():
        print("bench needs a GPU, and CuPy finds none", file=sys.stderr)
        return 2
    about = header(kernel_root())
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    providers = ["cupyflash", *filter(None, options.peers.split(","))]
    rows = []
    for row in run_bench(options.only, providers, options.peers_folder):
        rows.append(row)
        print(f"{len(rows)} {row['case']}", file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"header": about, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
