"""Values in 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.dtypes import ScalarType

from .convert import LARGEST, Array, round_to_fp8, storage

__all__ = ["quantize"]

_GOLDEN = 0x9E3779B1
_SMALLEST = np.float32(2.0**-126)


def quantize(
    x: Array, out: Array, scale: Any, made: Array | None, out_type: ScalarType, rotate: bool
) -> None:
    """As ``runtime.quantize_launch.quantize``; ``made`` takes the scales where none are given."""
    tokens, heads, head_dim = x.shape
    values = x.astype(np.float32)
    if rotate:
        values = _rotated(values)
    if made is not None:
        groups = len(made)
        size = np.abs(values)
        size[~np.isfinite(size)] = 0
        grouped = size.reshape(tokens, groups, heads // groups * head_dim)
        largest = grouped.max(axis=(0, 2), initial=0).astype(np.float32)
        with np.errstate(under="ignore"):
            found = np.maximum(largest / np.float32(LARGEST[out_type.name]), _SMALLEST)
        made[...] = np.where(largest > 0, found, np.float32(1))
        scale = made
    each = np.asarray(scale, np.float32).reshape(-1)
    each = np.repeat(each, heads // len(each)) if heads else each[:0]
    with np.errstate(all="ignore"):
        storage(out, out_type)[...] = round_to_fp8(values / each[:, None], out_type)


def _rotated(values: Array) -> Array:
    """Rows times a diagonal of signs and a Hadamard matrix, in the order of the kernel."""
    *rest, size = values.shape
    flip = (np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN % (1 << 32)) >> 31 == 1
    found = np.where(flip, -values, values)
    step = 1
    with np.errstate(invalid="ignore"):
        while step < size:
            pairs = found.reshape(*rest, size // (2 * step), 2, step)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            found = np.stack([a + b, a - b], axis=-2).reshape(values.shape)
            step *= 2
    rotated: Array = found * np.float32(size**-0.5)
    return rotated
