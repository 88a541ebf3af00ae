"""Tensor maps of TMA copies: the driver's ``cuTensorMapEncodeTiled``, and a bounded LRU of them."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

from .driver import driver_function

__all__ = [
    "NO_PROMOTION",
    "PROMOTE_128B",
    "SWIZZLE_128B",
    "UINT8",
    "UINT16",
    "ZERO_FILL",
    "encode_tensor_map",
    "rows_refusal",
]

# Of CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
UINT8, UINT16 = 0, 1
SWIZZLE_128B = 3
NO_PROMOTION, PROMOTE_128B = 0, 2
ZERO_FILL = 0

_NBYTES = 128
_ALIGNMENT = 64
_LARGEST_STRIDE = 1 << 40
_WIDE = 16


def rows_refusal(name: str, spec: Any, start: int) -> str:
    """Why TMA cannot read the rows of an array; empty where it can.

    Parameters
    ----------
    name : str
    spec : tuple
        Shape, dtype and strides in bytes.
    start : int
        Address, or what it leaves over multiples of 16.
    """
    shape, _, strides = spec
    if 0 in shape:
        return f"{name} is empty"
    steps = [s for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
    if start % _WIDE or any(s % _WIDE for s in steps):
        return f"{name}: rows do not start at multiples of {_WIDE} bytes"
    if any(not 0 < s < _LARGEST_STRIDE for s in steps):
        return f"{name}: strides {strides} are not between 0 and 2^40"
    return ""


@lru_cache(maxsize=4096)
def encode_tensor_map(
    element_type: int,
    pointer: int,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    l2_promotion: int,
    oob_fill: int,
) -> bytes:
    """A 128-byte tensor map, passed to a kernel by value. Equal calls share it.

    Parameters
    ----------
    element_type, swizzle, l2_promotion, oob_fill : int
        ``CUtensorMapDataType``, ``CUtensorMapSwizzle``, ``CUtensorMapL2promotion``,
        ``CUtensorMapFloatOOBfill``.
    pointer : int
        Global address, a multiple of 16.
    shape, box : tuple of int
        Elements in each dimension, the contiguous one first.
    strides_bytes : tuple of int
        Of the dimensions after the first; multiples of 16.

    Raises
    ------
    ValueError
        The driver refuses the map; the text names all that was asked.
    """
    rank = len(shape)
    raw = ctypes.create_string_buffer(_NBYTES + _ALIGNMENT)
    start = -ctypes.addressof(raw) % _ALIGNMENT
    status = _encode_tiled()(
        ctypes.addressof(raw) + start,
        element_type,
        rank,
        pointer,
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        swizzle,
        l2_promotion,
        oob_fill,
    )
    if status:
        raise ValueError(
            f"the driver refuses a tensor map (CUDA error {status}): element_type={element_type}, "
            f"pointer={pointer:#x}, shape={shape}, strides_bytes={strides_bytes}, box={box}, "
            f"swizzle={swizzle}; the address and strides must be multiples of 16, a box at most "
            "256 in each dimension, its row at most the swizzle's width"
        )
    return raw.raw[start : start + _NBYTES]


@cache
def _encode_tiled() -> Any:
    function = driver_function("cuTensorMapEncodeTiled")
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, u32, u32, pointer, *[pointer] * 4, *[u32] * 4]
    return function
