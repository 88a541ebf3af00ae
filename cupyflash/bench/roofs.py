"""Roofs of a GPU: what its memory and tensor cores reach, measured or recorded."""

from __future__ import annotations

from cupyflash.runtime.roofs import H200, Roofs, roofs_of

from .case import BenchCase
from .timing import seconds_of

__all__ = ["H200", "Roofs", "floor_seconds", "measure_roofs", "roofs_here"]


def floor_seconds(roofs: Roofs, case: BenchCase) -> float:
    """No run of ``case`` is much faster: its bytes or its FLOPs at these rates."""
    if case.kind in ("merge", "write"):
        return case.bytes_moved / roofs.copy
    return roofs.seconds(case.bytes_moved, case.flops, case.q_type == "e4m3")


def roofs_here(measure: bool = False) -> tuple[Roofs, str]:
    """Roofs of the current GPU, and where they are from.

    Parameters
    ----------
    measure : bool
        Measure them even where some were recorded for GPUs of this name.
    """
    import cupy as cp

    name = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()
    recorded = None if measure else roofs_of(name)
    if recorded is not None:
        return recorded, f"recorded for {name}"
    return measure_roofs(), "measured here"


def measure_roofs() -> Roofs:
    """Measure copy and 16-bit matrix rates of the current GPU; the others follow H200's ratios."""
    copy = _copy_rate()
    dense16 = _dense16_rate()
    return Roofs(copy * H200.read / H200.copy, copy, dense16, dense16 * H200.dense8 / H200.dense16)


def _copy_rate() -> float:
    import cupy as cp

    source = cp.random.default_rng(0).random(1 << 28, dtype=cp.float32)
    target = cp.empty_like(source)
    return float(2 * source.nbytes / seconds_of(lambda: cp.copyto(target, source)))


def _dense16_rate(n: int = 8192) -> float:
    import cupy as cp

    rng = cp.random.default_rng(1)
    a = rng.standard_normal((n, n), dtype=cp.float32).astype(cp.float16)
    out = cp.empty_like(a)
    return float(2 * n**3 / seconds_of(lambda: cp.matmul(a, a, out=out)))
