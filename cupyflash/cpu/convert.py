"""Between storage types and float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.runtime.dtypes import E4M3, ScalarType

__all__ = ["LARGEST", "Array", "per_head", "round_to_fp8", "storage", "widen"]

Array = NDArray[Any]

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_NAN_BYTE = 0x7F


@cache
def _table(kind: ScalarType) -> Array:
    """Every value of a type of 8 or 16 bits as float32, indexed by its bits."""
    bits = np.arange(1 << 8 * kind.itemsize, dtype=f"u{kind.itemsize}")
    return bits.view(kind.numpy).astype(np.float32)


def widen(array: Array, kind: ScalarType) -> Array:
    """An array of storage type ``kind`` as float32; float32 itself is returned as it is.

    fp8 and float16 go through a table, which is twice to ten times as fast as the conversion.
    """
    if kind.name == "fp32":
        return array
    if kind.name == "bf16":
        return array.astype(np.float32)
    return np.take(_table(kind), array.view(f"u{kind.itemsize}"))


def storage(array: Array, kind: ScalarType) -> Array:
    """A writable view of ``array`` that stores ``kind``; fp8 may be held as uint8."""
    return array if array.dtype == kind.numpy else array.view(kind.numpy)


def round_to_fp8(values: Array, kind: ScalarType = E4M3) -> Array:
    """float32 values as fp8, to nearest even, saturating; NaN is stored as 0x7F.

    Parameters
    ----------
    values : ndarray [...], float32
    kind : ScalarType
        ``E4M3`` or ``E5M2``.

    Returns
    -------
    ndarray [...] of ``kind.numpy``
        Infinities become the largest finite value of their sign.
    """
    limit = np.float32(LARGEST[kind.name])
    with np.errstate(invalid="ignore"):
        rounded = np.clip(values, -limit, limit).astype(kind.numpy)
    rounded.view(np.uint8)[np.isnan(values)] = _NAN_BYTE
    return rounded


def per_head(scale: Any, batch: int, num_heads: int) -> Array | None:
    """A descale (None, scalar, ``[1]`` or ``[batch, num_heads]``) as float32 [batch, num_heads]."""
    if scale is None:
        return None
    return np.broadcast_to(np.asarray(scale, np.float32), (batch, num_heads))
