"""What requests share: a prefix of whole blocks, or a tree of groups as kernels read it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.arrays import address_of
from cupyflash.runtime.shared_tile import MOST_LEVELS

from .numbers import non_negative

__all__ = ["check_schedule_buffer", "check_tree", "prefix_blocks"]


def check_tree(batch: Any, levels: Any, buffer: Any) -> None:
    """Refuse what is no tree of so many requests and levels; its entries are not read.

    Raises
    ------
    TypeError, ValueError
    """
    if not 1 <= non_negative("levels", levels) <= MOST_LEVELS:
        raise ValueError(f"levels={levels}: a tree has 1 to {MOST_LEVELS}")
    size = (2 * levels + 1) * non_negative("batch", batch)
    if buffer.dtype != np.int32 or buffer.shape != (size,) or not _contiguous(buffer):
        raise ValueError(
            f"buffer is {buffer.dtype} {buffer.shape} with strides {buffer.strides}; "
            f"this tree takes int32 ({size},), contiguous: {batch} requests, levels={levels}"
        )
    if address_of(buffer) % 8:
        raise ValueError("buffer of a tree must start at a multiple of 8 bytes")


def check_schedule_buffer(buffer: Any, nbytes: int) -> None:
    """Refuse what does not hold a schedule of so many bytes.

    Raises
    ------
    ValueError
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not _contiguous(buffer):
        raise ValueError(
            f"out is {buffer.dtype} {buffer.shape} with strides {buffer.strides}; it must be "
            f"contiguous uint8 [nbytes], at least {nbytes}"
        )
    if buffer.nbytes < nbytes:
        raise ValueError(f"out holds {buffer.nbytes} bytes; this schedule needs {nbytes}")
    if address_of(buffer) % 16:
        raise ValueError("out must start at a multiple of 16 bytes")


def prefix_blocks(common_prefix_len: Any, block_size: int, max_kv_len: Any) -> int:
    """Blocks of a prefix that all requests share.

    Raises
    ------
    TypeError, ValueError
        It is not whole blocks, or longer than requests may be.
    """
    length = non_negative("common_prefix_len", common_prefix_len)
    if length == 0 or length % block_size:
        nearest = max(1, round(length / block_size)) * block_size
        raise ValueError(
            f"common_prefix_len={length} must be a positive multiple of the block size "
            f"{block_size}; the nearest is {nearest}"
        )
    if non_negative("max_kv_len", max_kv_len) < length:
        raise ValueError(f"max_kv_len={max_kv_len} must hold the prefix, at least {length}")
    return length // block_size


def _contiguous(array: Any) -> bool:
    return bool(array.size < 2 or array.strides[-1] == array.dtype.itemsize)
