"""Launching ``reshape_and_cache_flash``; arguments are validated already."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .compile import native_arch
from .device import device_for
from .dtypes import ScalarType, scalar_type
from .overlap import Spec
from .row_kernel import RowShape
from .write_plan import WRITE_PARAMS, make_write_plan

__all__ = ["write_cache"]


def write_cache(
    arrays: tuple[Any, ...],
    specs: tuple[Any, ...],
    scales: tuple[float, float],
    cache_type: ScalarType,
    stream: Any,
) -> None:
    """Queue one write. Slots past the end of the cache are skipped, as negative ones are.

    Parameters
    ----------
    arrays : tuple
        `rules.cache.WRITE_ARRAYS`, as `cpu.write_cache` takes them.
    specs : tuple
        ``arrays.specs`` of them.
    scales : tuple of float
        Used where there is no array.
    cache_type : ScalarType
    stream : int, stream or None

    Raises
    ------
    ValueError
        Blocks times the square of the block size is 2^64 or more.
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    device = device_for(arrays[2])
    shape = _shape(native_arch(device.info.capability), specs, cache_type)
    pointer = device.pointer
    starts = [0 if array is None else pointer(array) for array in arrays]
    shape.queue(
        device, arrays, starts[0] | starts[1], starts[2] | starts[3], (*starts, *scales), stream
    )


@lru_cache(maxsize=1024)
def _shape(arch: str, specs: tuple[Any, ...], cache_type: ScalarType) -> RowShape:
    key, value, key_cache, value_cache, slots, *scales = specs
    in_type = scalar_type(key[1])
    assert in_type is not None
    num_blocks, block_size, heads, head_dim = key_cache[0]
    if num_blocks * block_size**2 >> 64:
        raise ValueError(f"a cache of {num_blocks} blocks of {block_size} slots is too large")
    dims = [head_dim, value_cache[0][3]]
    sides = [
        (*source[2][:2], *cache[2][:3], _scale_stride(scale))
        for source, cache, scale in zip((key, value), (key_cache, value_cache), scales, strict=True)
    ]
    elements = 16 // in_type.itemsize
    alignment = min(16, elements * cache_type.itemsize)
    allow_wide = all(
        not dim % elements and not (side[0] | side[1]) % 16
        and not (side[2] | side[3] | side[4]) % alignment
        for dim, side in zip(dims, sides, strict=True)
    )  # fmt: skip
    if all(
        side[1] == dim * in_type.itemsize and side[4] == dim * cache_type.itemsize and not side[5]
        for dim, side in zip(dims, sides, strict=True)
    ):
        heads, dims = min(heads, 1), [heads * dim for dim in dims]
    tokens = slots[0][0]
    plans, tails = [], []
    for vectorised in (False, True):
        plans.append(
            make_write_plan(arch, in_type, cache_type, tokens, heads, max(dims), vectorised)
        )
        tails.append(
            WRITE_PARAMS.pack_tail(
                *sides[0],
                *sides[1],
                num_blocks * block_size,
                -(-(1 << 64) // max(block_size, 1)) % (1 << 64),
                tokens,
                heads,
                *dims,
                block_size,
                slots[1].itemsize == 8,
                vectorised,
                0,
            )
        )
    return RowShape(WRITE_PARAMS, (plans[0], plans[1]), (tails[0], tails[1]), allow_wide, alignment)


def _scale_stride(scale: Spec | None) -> int:
    """Bytes from a head's scale to the next; 0 where all heads have one."""
    if scale is None or scale[0] in ((), (1,)):
        return 0
    return scale[2][0]
