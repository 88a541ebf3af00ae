"""What a benchmark run leaves behind: its header, its rows, its table."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "cells",
    "columns",
    "driver_version",
    "header",
    "kernels_digest",
    "table",
    "write_csv",
    "write_json",
]

Row = Mapping[str, Any]


def kernels_digest(folder: Path) -> str:
    """First 16 hex digits of SHA-256 over the kernel sources, by name."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def header(kernels: Path) -> dict[str, str]:
    """GPU, driver, CUDA, CuPy, commit and digest of the kernel sources."""
    import cupy as cp

    runtime = cp.cuda.runtime
    properties = runtime.getDeviceProperties(cp.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "driver": driver_version(),
        "cuda": str(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cp.cuda.nvrtc.getVersion())),
        "cupy": cp.__version__,
        "commit": _output("git", "-C", str(kernels), "describe", "--always", "--dirty"),
        "kernels_cu": kernels_digest(kernels),
    }


def driver_version() -> str:
    """As ``nvidia-smi`` gives it; "unknown" where it is missing."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def columns() -> list[str]:
    """Headings of `cells`."""
    return ["case", "floor µs", "ours µs", "of roof", "best peer", "µs", "peer / ours"]


def cells(row: Row) -> list[str]:
    """One case as text, "" where there is no figure."""
    times, floor = dict(row["us"]), row["floor_us"]
    ours = times.pop("cupyflash", None)
    peer = min(times, key=times.__getitem__, default="")
    return [
        row["case"],
        f"{floor:.1f}",
        f"{ours:.1f}" if ours else "",
        f"{floor / ours:.0%}" if ours else "",
        peer,
        f"{times[peer]:.1f}" if peer else "",
        f"{times[peer] / ours:.2f}" if peer and ours else "",
    ]


def table(rows: Iterable[Row]) -> str:
    """One line a case, and one for each provider that was skipped."""
    lines = ["{:38}{:>10}{:>10}{:>9}  {:10}{:>10}{:>13}".format(*columns())]
    for row in rows:
        lines.append("{:38}{:>10}{:>10}{:>9}  {:10}{:>10}{:>13}".format(*cells(row)))
        lines += [f"    {name}: {reason}" for name, reason in row["skipped"].items()]
    return "\n".join(lines)


def write_json(path: Path, about: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Header and rows; a reader finds the file as it was or whole."""
    _replace(path, json.dumps({"header": about, "rows": list(rows)}, indent=1))


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """One line a case and provider, times in microseconds."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(("case", "provider", "us", "host_us", "floor_us", "of_roof", "flops", "bytes"))
    for row in rows:
        for name, us in row["us"].items():
            floor = row["floor_us"]
            figures = (us, row["host_us"].get(name, ""), floor, floor / us)
            writer.writerow((row["case"], name, *figures, row["flops"], row["bytes"]))
    _replace(path, text.getvalue())


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, newline="")
    os.replace(beside, path)
