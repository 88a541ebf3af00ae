"""``precompile``: kernels ahead of time, into the cache or as files for a host without Python."""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import cupyflash
from cupyflash.bench.record import kernels_digest
from cupyflash.fa_version import current_capability
from cupyflash.runtime.compile import compile_source, compiled_file, kernel_source, native_arch
from cupyflash.runtime.cubin_cache import cubin_cache
from cupyflash.runtime.kernel_source import kernel_root
from cupyflash.runtime.nvrtc import compiler
from cupyflash.runtime.variant import Variant
from cupyflash.runtime.variants import every_variant

from .compile_many import JOBS, each_variant
from .kernel_description import C_FUNCTIONS, DESCRIPTIONS, described, launch_of, struct_of
from .terminal import CommandError

__all__ = ["add", "run"]

_HEADER = "cupyflash_kernels.h"


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("precompile", help="compile ahead: into the cache, or as files")
    parser.add_argument("--arch", help="sm_80, sm_90a, ...; that of the current GPU if left out")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="write a cubin and a JSON description of each kernel, and a C header; without it the "
        "cache of compiled kernels is filled",
    )  # fmt: skip
    parser.add_argument("--ptx", action="store_true", help="with --out: PTX instead of cubins")
    parser.add_argument("--only", default="", help="comma-separated parts of kernel names")
    parser.add_argument("--list", action="store_true", help="name the kernels and stop")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile every variant of an architecture."""
    if options.ptx and not options.out:
        raise CommandError("--ptx needs --out DIR; the cache holds what the GPU runs")
    variants = _variants(_arch(options.arch), options.only)
    if not variants:
        raise CommandError(f"--only {options.only}: no kernel has that in its name; see --list")
    if options.list:
        print("\n".join(variant.symbol for variant in variants))
        return 0
    if options.out is None:
        each_variant(compiled_file, variants, options.jobs)
        print(f"{len(variants)} kernels are in {cubin_cache().folder}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    ending = ".ptx" if options.ptx else ".cubin"
    write = partial(_write, folder=options.out, ending=ending)
    written = each_variant(write, variants, options.jobs)
    _write_index(options.out, written, variants)
    print(f"{len(written)} kernels are in {options.out}, with {_HEADER} and kernels.json")
    planned = sorted({v.source for v in variants} - set(DESCRIPTIONS))
    if planned:
        print(f"without rules for their launches, see `cupyflash export`: {', '.join(planned)}")
    return 0


def _arch(asked: str | None) -> str:
    """``sm_90`` for ``sm_90``, ``sm_90a``, ``90`` or ``9.0``: kernels name what they need of it."""
    if asked is None:
        capability, without = current_capability()
        if capability is None:
            raise CommandError(f"--arch is needed: {without}")
        return native_arch(capability)
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", asked)
    if found is None or int(found[1]) < 8:
        raise CommandError(f"--arch {asked}: say sm_80, sm_90a or a later one")
    return native_arch((int(found[1]), int(found[2])))


def _variants(arch: str, only: str) -> list[Variant]:
    parts = [part for part in only.split(",") if part]
    return [
        variant
        for variant in every_variant(arch)
        if not parts or any(part in variant.symbol for part in parts)
    ]


def _write(variant: Variant, folder: Path, ending: str) -> dict[str, Any]:
    source, options = kernel_source(variant)
    if ending == ".ptx":
        options = (options[0].replace("=sm_", "=compute_"), *options[1:])
    body, _ = compile_source(source, options, variant)
    path = folder / f"{variant.symbol}{ending}"
    path.write_bytes(body)
    description = described(variant, path.name)
    path.with_suffix(".json").write_text(json.dumps(description, indent=1) + "\n")
    return description


def _write_index(folder: Path, written: list[dict[str, Any]], variants: list[Variant]) -> None:
    index = {
        "cupyflash": cupyflash.__version__,
        "kernels_cu": kernels_digest(kernel_root()),
        "nvrtc": ".".join(map(str, compiler().version)),
        "kernels": {d["symbol"]: d["file"].rpartition(".")[0] + ".json" for d in written},
    }
    (folder / "kernels.json").write_text(json.dumps(index, indent=1) + "\n")
    structs: dict[str, str] = {}
    launches = []
    for variant in variants:
        if variant.source in DESCRIPTIONS:
            description = DESCRIPTIONS[variant.source](variant)
            structs[description.struct] = struct_of(description)
            launches.append(launch_of(variant.symbol, description))
    head = (
        "/* Of the kernels in this folder: their params, where pointers are device addresses, and\n"
        " * functions that fill in grid and block and return the dynamic shared memory. Kernels "
        "without\n * one are launched as `cupyflash export` says. */\n"
        "#pragma once\n#include <stdint.h>\n"
    )
    (folder / _HEADER).write_text("\n".join((head, *structs.values(), C_FUNCTIONS, *launches)))
