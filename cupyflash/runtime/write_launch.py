"""Launching ``reshape_and_cache_flash``; arguments are validated already."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .compile import native_arch
from .device import Device, device_for
from .dtypes import ScalarType, scalar_type
from .gpu_key import Known
from .overlap import Spec
from .row_kernel import RowShape
from .write_plan import WRITE_PARAMS, make_write_plan

__all__ = ["write_cache", "write_known"]

_known: Known[RowShape] = Known()


def write_known(key: Any, arrays: tuple[Any, ...], scales: tuple[Any, Any], stream: Any) -> bool:
    """Queue a write that `write_cache` has seen the like of; False where it has not.

    Parameters
    ----------
    key
        `gpu_key.gpu_key` of the arguments.
    arrays : tuple
        Without the scales.
    scales : tuple
        None, floats, or arrays.
    stream : int, stream or None
    """
    device = device_for(arrays[2])
    shape = _known.get(key, device)
    if shape is None:
        return False
    k, v = scales
    numbers = (k if type(k) is float else 1.0, v if type(v) is float else 1.0)
    in_memory = (None if type(k) is float else k, None if type(v) is float else v)
    _queue(shape, device, (*arrays, *in_memory), numbers, stream)
    return True


def write_cache(
    arrays: tuple[Any, ...],
    specs: tuple[Any, ...],
    scales: tuple[float, float],
    cache_type: ScalarType,
    stream: Any,
    key: Any = None,
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
    key : optional
        Under which `write_known` finds such writes from now on.

    Raises
    ------
    ValueError
        Blocks times the square of the block size is 2^64 or more.
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    device = device_for(arrays[2])
    shape = _shape(native_arch(device.info.capability), specs, cache_type)
    _queue(shape, device, arrays, scales, stream)
    if key is not None:
        _known.keep(key, device, shape)


def _queue(
    shape: RowShape,
    device: Device,
    arrays: tuple[Any, ...],
    scales: tuple[float, float],
    stream: Any,
) -> None:
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
