"""Roofs of a GPU: what its memory and tensor cores reach, measured or recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cases import BenchCase

__all__ = ["H200", "Roofs", "measure_roofs"]


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes a second and FLOPs a second.

    Attributes
    ----------
    read, copy : float
        A read-only stream; a copy, counting bytes read and bytes written.
    dense16, dense8 : float
        Dense matrix products of 16-bit and 8-bit operands.
    """

    read: float
    copy: float
    dense16: float
    dense8: float

    def floor_seconds(self, case: BenchCase) -> float:
        """No run of ``case`` is much faster: its bytes or its FLOPs at these rates."""
        if case.kind in ("merge", "write"):
            return case.bytes_moved / self.copy
        rate = self.dense8 if case.q_type == "e4m3" else self.dense16
        return max(case.bytes_moved / self.read, case.flops / rate)


H200 = Roofs(read=4.54e12, copy=4.31e12, dense16=780e12, dense8=1398e12)
"""Measured on one H200: read-only stream, device copy, 8192³ matrix products on random data."""


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
