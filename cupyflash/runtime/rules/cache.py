"""What ``reshape_and_cache_flash`` takes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyflash.runtime.arrays import ArraySpec
from cupyflash.runtime.dtypes import FP32, ScalarType, parse_fp8, scalar_type

from .operands import check_operand

__all__ = ["PLAIN_CACHES", "WRITE_ARRAYS", "check_write"]

WRITE_ARRAYS = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")

PLAIN_CACHES = {
    "auto": None,
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
}
"""Spellings of a cache without scales, and the type that each asks for."""

_BLOCKS = "[num_blocks, block_size, Hk, D]"


@lru_cache(maxsize=1024)
def check_write(
    given: tuple[tuple[Any, ...] | None, ...], numbers: tuple[float, float], kv_cache_dtype: str
) -> ScalarType:
    """What the cache stores, once arrays, spelling and scales fit each other.

    ``given`` are the specs of `WRITE_ARRAYS`; ``numbers`` are the scales that are not arrays.
    """
    specs = {
        name: ArraySpec(*spec)
        for name, spec in zip(WRITE_ARRAYS, given, strict=True)
        if spec is not None
    }
    scales = {
        name: specs.get(name, number)
        for name, number in zip(WRITE_ARRAYS[5:], numbers, strict=True)
    }
    tokens, *rest = check_operand("key", specs["key"], "[tokens, Hk, D]")
    tokens_v, *rest_v = check_operand("value", specs["value"], "[tokens, Hk, Dv]")
    *blocks, heads, head_dim = check_operand("key_cache", specs["key_cache"], _BLOCKS)
    *blocks_v, heads_v, head_dim_v = check_operand("value_cache", specs["value_cache"], _BLOCKS)
    if rest != [heads, head_dim] or rest_v != [heads_v, head_dim_v] or heads != heads_v:
        raise ValueError(
            f"[Hk, D] is {rest} in key, {[heads, head_dim]} in key_cache, {rest_v} in value, "
            f"{[heads_v, head_dim_v]} in value_cache; each must fit its cache, and Hk all of them"
        )
    if blocks != blocks_v:
        raise ValueError(
            f"key_cache has [num_blocks, block_size] {blocks} and value_cache {blocks_v}; they "
            "must be the same"
        )
    for name in ("key_cache", "value_cache"):
        if specs[name].overlaps:
            raise ValueError(f"{name} has strides {specs[name].strides}: its slots share memory")
    _check_slots(specs["slot_mapping"], min(tokens, tokens_v))
    cache_type = _cache_type(specs, kv_cache_dtype)
    for name, scale in scales.items():
        _check_scale(name, scale, cache_type, heads)
    return cache_type


def _check_slots(slots: ArraySpec, tokens: int) -> None:
    if slots.dtype not in (np.int32, np.int64):
        raise TypeError(f"slot_mapping is {slots.dtype}; it must be int32 or int64")
    if len(slots.shape) != 1 or not slots.unit_stride:
        raise ValueError(f"slot_mapping has shape {slots.shape}; it must be contiguous [tokens]")
    if tokens < slots.shape[0]:
        raise ValueError(
            f"slot_mapping has {slots.shape[0]} slots, but key and value have {tokens} tokens; "
            "there must be a token for every slot"
        )


def _cache_type(specs: dict[str, ArraySpec], kv_cache_dtype: str) -> ScalarType:
    """What the caches hold, from the spelling and their dtype."""
    source = scalar_type(specs["key"].dtype)
    if source is None or source.is_fp8 or scalar_type(specs["value"].dtype) is not source:
        raise TypeError(
            f"key is {specs['key'].dtype} and value {specs['value'].dtype}; use one of float16, "
            "bfloat16 and float32 for both"
        )
    dtype, other = specs["key_cache"].dtype, specs["value_cache"].dtype
    if dtype != other:
        raise TypeError(f"key_cache is {dtype} and value_cache {other}; they must be the same")
    given = f"kv_cache_dtype={kv_cache_dtype!r}, but the cache is {dtype}"
    if kv_cache_dtype not in PLAIN_CACHES:
        named = parse_fp8(kv_cache_dtype, "kv_cache_dtype")
        if dtype != np.uint8 and scalar_type(dtype) is not named:
            raise TypeError(f"{given}; use uint8 or {named.numpy}")
        return named
    found = scalar_type(dtype)
    if found is None or found.is_fp8:
        raise TypeError(f"{given}; name its format (fp8_e4m3, fp8_e5m2) or use a 16-bit cache")
    wanted = PLAIN_CACHES[kv_cache_dtype]
    if wanted not in (None, found.name):
        raise TypeError(f'{given}; use "auto"')
    if source not in (found, FP32) and (wanted is None or found is FP32):
        hint = "" if found is FP32 else f", or ask for it by kv_cache_dtype={found.numpy.name!r}"
        raise TypeError(
            f"key is {source.name} and the cache {found.name}; use a {source.name} cache{hint}"
        )
    return found


def _check_scale(name: str, scale: float | ArraySpec, cache_type: ScalarType, heads: int) -> None:
    if isinstance(scale, float):
        if scale <= 0:
            raise ValueError(f"{name}={scale} must be positive")
        if scale != 1.0 and not cache_type.is_fp8:
            raise ValueError(
                f"{name}={scale}: a cache in {cache_type.name} takes no scale; use 1.0"
            )
        return
    if scale.dtype != np.float32:
        raise TypeError(f"{name} is {scale.dtype}; it must be float32")
    if scale.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{name} has shape {scale.shape}; it must be [{heads}], [1] or a number")
