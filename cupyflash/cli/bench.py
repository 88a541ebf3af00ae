"""``bench``: the standard cases on this GPU, beside their floors and beside peers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyflash.bench import bench_cases, cells, columns, header, run_bench, write_csv, write_json
from cupyflash.bench.kernels import needed_kernels
from cupyflash.bench.peers import PEERS
from cupyflash.bench.roofs import roofs_here
from cupyflash.runtime.cupy_import import load_cupy
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.kernel_source import kernel_root

from .call_options import gpu_of
from .compile_many import JOBS, compile_ahead
from .outputs import check_outputs
from .terminal import CommandError, print_as_done, print_pairs

__all__ = ["add", "run"]

_WIDEST = ("10000.0", "10000.0", "100%", "cupyflash", "10000.0", "10.00")  # of `columns`


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("bench", help="time the standard cases on this GPU")
    parser.add_argument("--only", default="", help="comma-separated parts of case names")
    parser.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--peers-folder", type=Path, help="folder with fa3.so, flashmla.so")
    parser.add_argument(
        "--roofs", choices=("auto", "measured"), default="auto",
        help="auto = those recorded for GPUs of this name, measured here where there are none",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=JOBS, help="processes that compile before the first case"
    )
    parser.add_argument("--json", type=Path, help="write header and rows here, as they are done")
    parser.add_argument("--csv", type=Path, help="write a row a case and provider here, likewise")
    parser.add_argument("--plot", type=Path, help="draw shares of the roof here (.png, .svg, .pdf)")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Time the cases and print their table."""
    cases = bench_cases(options.only)
    if not cases:
        raise CommandError(f"--only {options.only}: no case has that in its name; see --list")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    peers = [name for name in options.peers.split(",") if name]
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise CommandError(f"--peers {', '.join(unknown)}: those known are {', '.join(PEERS)}")
    check_outputs(options.json, options.csv, plot=options.plot)
    _need_gpu()
    about: dict[str, Any] = header(kernel_root())
    compile_ahead(needed_kernels(cases, _device()), options.jobs)
    roofs, source = roofs_here(measure=options.roofs == "measured")
    about["roofs"] = {"from": source, **roofs.as_dict()}
    print_pairs((name, _text(value)) for name, value in about.items())
    timed = run_bench(options.only, ["cupyflash", *peers], options.peers_folder, roofs)
    rows: list[Mapping[str, Any]] = []
    widest = (max((case.name for case in cases), key=len), *_WIDEST)
    try:
        for done in print_as_done(columns(), widest, timed, cells, len(cases)):
            rows.append(done)
            _write(options, about, rows)
    finally:  # what is done is told when the rest is interrupted
        for row in rows:
            for name, reason in row["skipped"].items():
                print(f"{row['case']}, {name}: {reason}")
        if options.plot and rows:
            from cupyflash.bench.plot import plot

            plot(options.plot, about, rows)
    return 0


def _write(
    options: argparse.Namespace, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    if options.json:
        write_json(options.json, about, rows)
    if options.csv:
        write_csv(options.csv, rows)


def _text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(
        f"{name} {part:.3g}" if isinstance(part, float) else f"{name} {part}"
        for name, part in value.items()
    )


def _device() -> DeviceInfo:
    found = gpu_of("here")
    assert found is not None
    return found


def _need_gpu() -> None:
    try:
        cupy = load_cupy()
    except ImportError as error:
        raise CommandError(
            "bench needs a GPU and CuPy: pip install 'cupyflash[cuda13]' or [cuda12]"
        ) from error
    if not cupy.is_available():
        raise CommandError("bench needs a GPU, and CuPy finds none; see `cupyflash info`")
