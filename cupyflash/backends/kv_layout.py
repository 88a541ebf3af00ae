"""Shapes and memory orders of KV caches, and their halves as views."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "PACKED_LAYOUTS",
    "empty_kv_cache",
    "kv_cache_stride_order",
    "packed_kv_cache_stride_order",
    "split_kv_cache",
]

Array = Any  # NumPy or CuPy

_SEPARATE = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}
PACKED_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Memory orders of packed caches: layers, blocks, heads, tokens (N), content (C)."""


def kv_cache_stride_order(layout: str = "NHD") -> tuple[int, ...]:
    """The axes of [2, num_blocks, block_size, Hk, D] in memory order.

    Parameters
    ----------
    layout : {"NHD", "HND"}

    Raises
    ------
    ValueError
        Another layout.
    """
    if layout not in _SEPARATE:
        raise ValueError(f"layout={layout!r}; use one of {', '.join(_SEPARATE)}")
    return _SEPARATE[layout]


def packed_kv_cache_stride_order(layout: str = "LBNHC") -> tuple[int, ...]:
    """The axes of [layers, num_blocks, Hk, block_size, 2 D] in memory order.

    Parameters
    ----------
    layout : str
        One of ``PACKED_LAYOUTS``, or ``"NHD"`` = LBNHC, ``"HND"`` = LBHNC.

    Raises
    ------
    ValueError
        Another layout.
    """
    name = {"NHD": "LBNHC", "HND": "LBHNC"}.get(layout, layout)
    if name not in PACKED_LAYOUTS:
        raise ValueError(f"layout={layout!r}; use one of {', '.join(PACKED_LAYOUTS)}, NHD, HND")
    return tuple("LBHNC".index(axis) for axis in name)


def empty_kv_cache(
    shape: tuple[int, ...], stride_order: tuple[int, ...], dtype: Any, xp: Any = np
) -> Array:
    """A zeroed cache of this shape whose memory has its axes in ``stride_order``."""
    physical = xp.zeros(tuple(shape[axis] for axis in stride_order), dtype)
    return physical.transpose(*(stride_order.index(axis) for axis in range(len(shape))))


def split_kv_cache(kv_cache: Array, num_kv_heads: int, head_size: int) -> tuple[Array, Array]:
    """The key and the value cache, [num_blocks, block_size, Hk, D] each, as views.

    Parameters
    ----------
    kv_cache : array
        [2, num_blocks, block_size, Hk, D], or packed [num_blocks, Hk, block_size, 2 D] with a
        token's key and value side by side. Any strides, the last axis contiguous.
    num_kv_heads, head_size : int

    Raises
    ------
    ValueError
        Any other shape.
    """
    shape: tuple[int, ...] = getattr(kv_cache, "shape", ())
    if len(shape) == 5 and shape[0] == 2 and shape[3:] == (num_kv_heads, head_size):
        return kv_cache[0], kv_cache[1]
    if len(shape) == 4 and shape[1] == num_kv_heads and shape[3] == 2 * head_size:
        rows = kv_cache.transpose(0, 2, 1, 3)
        return rows[..., :head_size], rows[..., head_size:]
    raise ValueError(
        f"kv_cache has shape {shape}; it must be [2, num_blocks, block_size, {num_kv_heads}, "
        f"{head_size}] or packed [num_blocks, {num_kv_heads}, block_size, {2 * head_size}]"
    )
