"""What a benchmark run leaves behind: its header, its rows, its table."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["header", "kernels_digest", "table"]

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
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": str(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cp.cuda.nvrtc.getVersion())),
        "cupy": cp.__version__,
        "commit": _output("git", "-C", str(kernels), "describe", "--always", "--dirty"),
        "kernels_cu": kernels_digest(kernels),
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def table(rows: Iterable[Row]) -> str:
    """One line a case: floor, best peer, ours, and the ratio that counts (peer / ours)."""
    lines = [
        f"{'case':38}{'floor us':>10}{'ours us':>10}{'of roof':>9}{'best peer us':>22}{'ratio':>7}"
    ]
    for row in rows:
        times = dict(row["us"])
        ours, best = (
            times.pop("cupyflash", None),
            min(times.items(), key=lambda x: x[1], default=None),
        )
        floor = row["floor_us"]
        cells = [
            f"{row['case']:38}{floor:10.1f}",
            f"{ours:10.1f}{floor / ours:9.0%}" if ours else f"{'-':>10}{'-':>9}",
            f"{best[0] + ' ' + format(best[1], '.1f'):>22}" if best else f"{'-':>22}",
            f"{best[1] / ours:7.2f}" if best and ours else f"{'-':>7}",
        ]
        lines.append("".join(cells))
        lines += [f"    {name}: {reason}" for name, reason in row["skipped"].items()]
    return "\n".join(lines)
