"""Launching the kernels that merge states and write caches; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .compile import native_arch
from .device import Device, device_for
from .dtypes import ScalarType, scalar_type
from .launch import launch, stream_handle
from .merge_plan import MERGE_PARAMS, make_merge_plan
from .overlap import check_in_place
from .params import KernelArgs
from .write_plan import WRITE_PARAMS, make_write_plan

__all__ = ["merge_states", "write_cache"]


def merge_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any,
    prefix_tokens: int,
    output_scale: Any,
    s_aux: Any,
    out_type: ScalarType,
    *,
    stream: Any = None,
) -> None:
    """Queue ``merge_attn_states``; the arguments are those of `cpu.merge_states`.

    Raises
    ------
    ValueError
        An output shares memory with an input without being that input.
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    device = device_for(output)
    check_in_place(
        device, output, "output", {"prefix_output": prefix_output, "suffix_output": suffix_output}
    )
    if output_lse is not None:
        check_in_place(
            device, output_lse, "output_lse", {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}
        )
    in_type = _type_of(prefix_output)
    tokens, heads, head_dim = output.shape
    wide = 16 // in_type.itemsize
    vectorised = (
        head_dim % wide == 0
        and _aligned(device, 16, prefix_output, suffix_output)
        and _aligned(device, min(16, wide * out_type.itemsize), output)
    )
    plan = make_merge_plan(
        native_arch(device.info.capability), in_type, out_type, tokens, heads, head_dim, vectorised
    )
    pointer = device.pointer
    scale_array, scale = _scale(output_scale)
    packed = MERGE_PARAMS.pack(
        pointer(output),
        pointer(prefix_output),
        pointer(suffix_output),
        pointer(prefix_lse),
        pointer(suffix_lse),
        0 if output_lse is None else pointer(output_lse),
        0 if s_aux is None else pointer(s_aux),
        0 if scale_array is None else pointer(scale_array),
        *output.strides[:2],
        *prefix_output.strides[:2],
        *suffix_output.strides[:2],
        *prefix_lse.strides,
        *suffix_lse.strides,
        *((0, 0) if output_lse is None else output_lse.strides),
        0 if s_aux is None else s_aux.strides[0],
        tokens,
        heads,
        head_dim,
        prefix_tokens,
        0 if s_aux is None else _type_of(s_aux).code,
        vectorised,
        scale,
    )
    arrays = (output, prefix_output, prefix_lse, suffix_output, suffix_lse)
    arrays += tuple(a for a in (output_lse, s_aux, scale_array) if a is not None)
    launch(device, plan, KernelArgs((packed,), arrays), stream_handle(stream))


def write_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    cache_type: ScalarType,
    k_scale: Any,
    v_scale: Any,
    *,
    stream: Any = None,
) -> None:
    """Queue ``reshape_and_cache_flash``; the arguments are those of `cpu.write_cache`.

    Slots past the end of the cache are skipped, as negative ones are.

    Raises
    ------
    ValueError
        Blocks times the square of the block size is 2^64 or more.
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    device = device_for(key_cache)
    in_type = _type_of(key)
    num_blocks, block_size, heads, head_dim = key_cache.shape
    if num_blocks * block_size**2 >> 64:
        raise ValueError(f"a cache of {num_blocks} blocks of {block_size} slots is too large")
    head_dim_v = value_cache.shape[3]
    tokens = slot_mapping.shape[0]
    wide = 16 // in_type.itemsize
    vectorised = (
        head_dim % wide == head_dim_v % wide == 0
        and _aligned(device, 16, key, value)
        and _aligned(device, min(16, wide * cache_type.itemsize), key_cache, value_cache)
    )
    plan = make_write_plan(
        native_arch(device.info.capability),
        in_type,
        cache_type,
        tokens,
        heads,
        max(head_dim, head_dim_v),
        vectorised,
    )
    packed = WRITE_PARAMS.pack(
        *_side(device, key, key_cache, k_scale),
        *_side(device, value, value_cache, v_scale),
        device.pointer(slot_mapping),
        num_blocks * block_size,
        -(-(1 << 64) // block_size) % (1 << 64),
        tokens,
        heads,
        block_size,
        slot_mapping.itemsize == 8,
        vectorised,
        0,
    )
    arrays = (key, value, key_cache, value_cache, slot_mapping)
    arrays += tuple(a for a, _ in (_scale(k_scale), _scale(v_scale)) if a is not None)
    launch(device, plan, KernelArgs((packed,), arrays), stream_handle(stream))


def _side(device: Device, source: Any, cache: Any, given: Any) -> tuple[Any, ...]:
    array, number = _scale(given)
    return (
        device.pointer(source),
        device.pointer(cache),
        0 if array is None else device.pointer(array),
        *source.strides[:2],
        *cache.strides[:3],
        0 if array is None or array.size == 1 else array.strides[0],
        cache.shape[3],
        number,
    )


def _scale(given: Any) -> tuple[Any, float]:
    """An array that the kernel reads, or a number."""
    if given is None:
        return None, 1.0
    return (None, float(given)) if isinstance(given, (int, float)) else (given, 1.0)


def _type_of(array: Any) -> ScalarType:
    found = scalar_type(array.dtype)
    assert found is not None
    return found


def _aligned(device: Device, nbytes: int, *arrays: Any) -> bool:
    """Whether every row starts at a multiple of ``nbytes``."""
    bits = 0
    for array in arrays:
        bits |= device.pointer(array)
        for stride in array.strides[:-1]:
            bits |= stride
    return bits % nbytes == 0
