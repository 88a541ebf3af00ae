"""Values in 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.dtypes import ScalarType

from .convert import LARGEST, Array, round_to_fp8, storage

__all__ = ["quantize"]

_SMALLEST = np.float32(2.0**-126)


def quantize(x: Array, out: Array, scale: Any, made: Array | None, out_type: ScalarType) -> None:
    """As ``runtime.quantize_launch.quantize``; ``made`` takes the scales where none are given."""
    tokens, heads, head_dim = x.shape
    values = x.astype(np.float32)
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
