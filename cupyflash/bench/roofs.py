"""Roofs of a GPU: what its memory and tensor cores reach, measured or recorded."""

from __future__ import annotations

from typing import Any

from cupyflash.runtime.roofs import H200, Roofs

from .cases import BenchCase

__all__ = ["H200", "Roofs", "floor_seconds", "measure_roofs"]


def floor_seconds(roofs: Roofs, case: BenchCase) -> float:
    """No run of ``case`` is much faster: its bytes or its FLOPs at these rates."""
    if case.kind in ("merge", "write"):
        return case.bytes_moved / roofs.copy
    return roofs.seconds(case.bytes_moved, case.flops, case.q_type == "e4m3")


def measure_roofs(seconds_of: Any) -> Roofs:
    """Measure copy and 16-bit matrix rates of the current GPU; the others follow H200's ratios.

    Parameters
    ----------
    seconds_of : callable
        Median seconds of a function that queues GPU work (``timing.seconds_of``).
    """
    copy = _copy_rate(seconds_of)
    dense16 = _dense16_rate(seconds_of)
    return Roofs(copy * H200.read / H200.copy, copy, dense16, dense16 * H200.dense8 / H200.dense16)


def _copy_rate(seconds_of: Any) -> float:
    import cupy as cp

    source = cp.random.default_rng(0).random(1 << 28, dtype=cp.float32)
    target = cp.empty_like(source)
    return float(2 * source.nbytes / seconds_of(lambda: cp.copyto(target, source)))


def _dense16_rate(seconds_of: Any, n: int = 8192) -> float:
    import cupy as cp

    rng = cp.random.default_rng(1)
    a = rng.standard_normal((n, n), dtype=cp.float32).astype(cp.float16)
    out = cp.empty_like(a)
    return float(2 * n**3 / seconds_of(lambda: cp.matmul(a, a, out=out)))
