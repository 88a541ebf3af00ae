"""CuPy arrays over memory that they do not own, kept for arrays that will lie there alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from .cupy_import import load_cupy

__all__ = ["keep", "view_over", "views"]

_MOST_VIEWS = 8192

views: dict[Hashable, Any] = {}
"""By all that an array shows of itself, its device too where there are several."""


def keep(key: Hashable, view: Any) -> Any:
    """The view, or the one that was kept meanwhile."""
    if len(views) >= _MOST_VIEWS:
        views.clear()
    return views.setdefault(key, view)


def view_over(
    address: int, dtype: np.dtype[Any], shape: Sequence[int], strides: Sequence[int], ordinal: int
) -> Any:
    """A CuPy array; None for one without elements, or that runs backwards.

    Parameters
    ----------
    address : int
    dtype : numpy.dtype
    shape, strides : sequence of int
        Strides in bytes.
    ordinal : int
        The GPU.
    """
    if 0 in shape or any(step < 0 for step in strides):
        return None
    cp = load_cupy()
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = cp.cuda.UnownedMemory(address, reach, None, ordinal)
    start = cp.cuda.MemoryPointer(memory, 0)
    return cp.ndarray(tuple(shape), dtype, memptr=start, strides=tuple(strides))
