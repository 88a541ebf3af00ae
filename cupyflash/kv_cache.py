"""The KV cache: writing new tokens, and attention that appends first."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cpu
from .attention import batched_result, check_batched_lse, flash_attn_varlen_func
from .runtime import rules
from .runtime.arrays import array_module, as_array, merge_leading, on_host
from .runtime.dtypes import FP32, ScalarType, parse_fp8, scalar_type

__all__ = ["flash_attn_with_kvcache", "reshape_and_cache_flash"]

_PLAIN = {"auto": None, "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    *,
    stream: Any = None,
) -> None:
    """Store the keys and values of new tokens at their slots of a paged cache.

    Parameters
    ----------
    key, value : array [tokens, Hk, D], [tokens, Hk, Dv], float16, bfloat16 or float32
        At least as many tokens as `slot_mapping`; more are padding and are not read.
    key_cache, value_cache : array [num_blocks, block_size, Hk, D], [..., Dv]
        Written in place; any strides, the last dimension contiguous.
    slot_mapping : array [num_slots], int32 or int64
        ``block * block_size + offset`` of each token; negative = skip the token.
    kv_cache_dtype : str
        ``"auto"``: the caches' own dtype, with no scale; ``"fp8"``, ``"fp8_e5m2"`` and so on:
        caches in uint8 or that ml_dtypes type.
    k_scale, v_scale : number, or array [1] or [Hk], float32
        The stored value is ``x / scale``, to nearest even, saturated (infinities too); NaN stays
        NaN. Only fp8 caches use it.
    stream : int or stream, optional
        The current stream if None.

    Raises
    ------
    TypeError
        A dtype, or arrays on the CPU and on a GPU in one call.
    ValueError
        A shape, an unknown spelling, a scale other than 1 for a 16-bit cache, a slot past the end
        (on the CPU; on a GPU under ``CUPYFLASH_CHECK=1``).
    """
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    given = (key, value, key_cache, value_cache, slot_mapping)
    arrays = {name: as_array(array, name) for name, array in zip(names, given, strict=True)}
    scales = {n: _scale(n, s) for n, s in (("k_scale", k_scale), ("v_scale", v_scale))}
    on_device = {n: s for n, s in scales.items() if not isinstance(s, float)}
    host = on_host(**arrays, **on_device)
    cache_type = _check_write(arrays, scales, kv_cache_dtype)
    if host:
        cpu.write_cache(
            **arrays, cache_type=cache_type, k_scale=scales["k_scale"], v_scale=scales["v_scale"]
        )
        return
    from .runtime.small_kernels import write_cache

    write_cache(**arrays, cache_type=cache_type, **scales, stream=stream)


def _scale(name: str, value: Any) -> Any:
    if value is None:
        return 1.0
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return float(value)
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return as_array(value, name)
    return rules.python_scalar(name, value)


def _check_write(arrays: dict[str, Any], scales: dict[str, Any], kv_cache_dtype: str) -> ScalarType:
    specs = {name: rules.spec_of(array) for name, array in arrays.items()}
    tokens_k, heads, head_dim = rules.check_rank("key", specs["key"], 3, "[tokens, Hk, D]")
    tokens_v, heads_v, head_dim_v = rules.check_rank("value", specs["value"], 3, "[tokens, Hk, Dv]")
    layout = "[num_blocks, block_size, Hk, D]"
    blocks_k, page_k, *rest_k = rules.check_rank("key_cache", specs["key_cache"], 4, layout)
    blocks_v, page_v, *rest_v = rules.check_rank("value_cache", specs["value_cache"], 4, layout)
    slots = specs["slot_mapping"]
    if slots.dtype not in (np.int32, np.int64):
        raise TypeError(f"slot_mapping is {slots.dtype}; it must be int32 or int64")
    if len(slots.shape) != 1 or not slots.unit_stride:
        raise ValueError(f"slot_mapping has shape {slots.shape}; it must be contiguous [tokens]")
    if min(tokens_k, tokens_v) < slots.shape[0]:
        raise ValueError(
            f"slot_mapping has {slots.shape[0]} slots, key {tokens_k} and value {tokens_v} tokens; "
            "there must be a token for every slot"
        )
    if (heads, head_dim) != tuple(rest_k) or (heads_v, head_dim_v) != tuple(rest_v):
        raise ValueError(
            f"key has [Hk, D]={[heads, head_dim]} and its cache {rest_k}, value "
            f"{[heads_v, head_dim_v]} and its cache {rest_v}; they must be the same"
        )
    if heads != heads_v or (blocks_k, page_k) != (blocks_v, page_v):
        raise ValueError(
            f"key_cache {specs['key_cache'].shape} and value_cache {specs['value_cache'].shape} "
            "must have the same blocks, block size and heads"
        )
    return _check_write_types(specs, scales, kv_cache_dtype, heads)


def _check_write_types(
    specs: dict[str, Any], scales: dict[str, Any], kv_cache_dtype: str, heads: int
) -> ScalarType:
    source = scalar_type(specs["key"].dtype)
    if source is None or source.is_fp8 or scalar_type(specs["value"].dtype) is not source:
        raise TypeError(
            f"key is {specs['key'].dtype} and value {specs['value'].dtype}; use one of float16, "
            "bfloat16, float32 for both"
        )
    cache_type = _cache_type(specs, kv_cache_dtype)
    for name, scale in scales.items():
        if isinstance(scale, float):
            if not cache_type.is_fp8 and scale != 1.0:
                raise ValueError(f"{name}={scale}: a {cache_type.name} cache takes no scale; use 1")
            if not scale > 0:
                raise ValueError(f"{name}={scale} must be positive")
            continue
        spec = rules.spec_of(scale)
        if spec.dtype != np.float32:
            raise TypeError(f"{name} is {scale.dtype}; it must be float32")
        if spec.shape not in ((), (1,), (heads,)):
            raise ValueError(f"{name} has shape {spec.shape}; it must be [1] or [{heads}]")
    return cache_type


def _cache_type(specs: dict[str, Any], kv_cache_dtype: str) -> ScalarType:
    """What the caches hold, from the spelling and their dtype."""
    dtype = specs["key_cache"].dtype
    if specs["value_cache"].dtype != dtype:
        raise TypeError(f"key_cache is {dtype}, value_cache {specs['value_cache'].dtype}")
    if kv_cache_dtype in _PLAIN:
        found = scalar_type(dtype)
        wanted = _PLAIN[kv_cache_dtype]
        if found is None or found.is_fp8 or (found is FP32 and specs["key"].dtype != np.float32):
            raise TypeError(
                f"kv_cache_dtype={kv_cache_dtype!r}, but the cache is {dtype}; name its fp8 format "
                "(fp8, fp8_e4m3, fp8_e5m2), or use a float16 or bfloat16 cache"
            )
        if wanted is not None and found.name != wanted:
            raise TypeError(f"kv_cache_dtype={kv_cache_dtype!r}, but the cache is {dtype}")
        return found
    named = parse_fp8(kv_cache_dtype, "kv_cache_dtype")
    if dtype != np.uint8 and scalar_type(dtype) is not named:
        raise TypeError(f"kv_cache_dtype={kv_cache_dtype!r}, but the cache is {dtype}; use uint8")
    return named


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any,
    block_table: Any = None,
    kv_cache_dtype: str = "auto",
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_leftpad: Any = None,
    out: Any = None,
    lse: Any = None,
    return_softmax_lse: bool = False,
    **options: Any,
) -> Any:
    """Append new keys and values to a cache in place, then attend to all of it.

    Parameters
    ----------
    q : array [batch, Sq, Hq, D]
    k_cache, v_cache : array
        Blocks [num_blocks, block_size, Hk, D(v)] with `block_table`, else one row a request
        [batch, capacity, Hk, D(v)]. Written in place where `k` and `v` are given.
    k, v : array [batch, S_new, Hk, D], [batch, S_new, Hk, Dv], optional
        New tokens, stored after the first ``cache_seqlens`` ones.
    cache_seqlens : array [batch], int32
        Keys in the cache of each request before the call.
    block_table : array [batch, max_blocks], int32, optional
    kv_cache_dtype, k_scale, v_scale
        As `reshape_and_cache_flash`; attention takes ``k_descale`` and ``v_descale`` itself.
    rotary_cos, rotary_sin, cache_leftpad
        Refused: rotate before the call; left padding is a shorter request.
    out : array [batch, Sq, Hq, Dv], optional
    lse : array [batch, Hq, Sq], float32, optional
    return_softmax_lse : bool
    **options
        As `flash_attn_varlen_func` takes them.

    Returns
    -------
    out : array [batch, Sq, Hq, Dv]
    lse : array [batch, Hq, Sq], float32
        Only with `return_softmax_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the two functions it stands on; new tokens without room are a ValueError on the CPU.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise NotImplementedError("rotary_cos, rotary_sin: rotate q and k before the call")
    if cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad: start the request at its first real key instead")
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together; pass both or neither")
    q, k_cache, v_cache = (
        as_array(a, n) for a, n in ((q, "q"), (k_cache, "k_cache"), (v_cache, "v_cache"))
    )
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; it must be [batch, Sq, Hq, D]")
    batch, len_q, heads, _ = q.shape
    check_batched_lse(lse, (batch, heads, len_q))
    lengths = as_array(cache_seqlens, "cache_seqlens")
    rules.check_lengths("cache_seqlens", rules.spec_of(lengths), batch)
    module = array_module(lengths)
    if block_table is None:
        block_table = module.arange(k_cache.shape[0], dtype=np.int32)[:, None]
    table = as_array(block_table, "block_table")
    if k is not None:
        k, v = as_array(k, "k"), as_array(v, "v")
        slots = _append_slots(lengths, table, k, k_cache)
        pair = (merge_leading(k, "k", copy=True), merge_leading(v, "v", copy=True))
        reshape_and_cache_flash(*pair, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale)
        lengths = lengths + np.int32(k.shape[1])
    if kv_cache_dtype not in _PLAIN:
        options = {"fp8_dtype": kv_cache_dtype, **options}
    found = flash_attn_varlen_func(
        merge_leading(q, "q", copy=True), k_cache, v_cache, len_q,
        module.arange(batch + 1, dtype=np.int32) * np.int32(len_q),
        table.shape[1] * k_cache.shape[1], seqused_k=lengths, block_table=table,
        out=None if out is None else merge_leading(as_array(out, "out"), "out"),
        return_softmax_lse=return_softmax_lse or lse is not None, **options,
    )  # fmt: skip
    return batched_result(found, (batch, len_q, heads), out, lse, return_softmax_lse)


def _append_slots(lengths: Any, table: Any, k: Any, k_cache: Any) -> Any:
    """Slots [batch * S_new] of the new tokens: right behind each request's keys."""
    if k.ndim != 4 or k.shape[0] != lengths.shape[0]:
        raise ValueError(f"k has shape {k.shape}; it must be [{lengths.shape[0]}, S_new, Hk, D]")
    module, page = array_module(lengths), k_cache.shape[1]
    position = lengths[:, None].astype(np.int64) + module.arange(k.shape[1])
    if module is np and position.size and position.max() >= table.shape[1] * page:
        raise ValueError(
            f"new tokens reach position {position.max()}, but block_table has room for "
            f"{table.shape[1] * page} keys a request"
        )
    blocks = module.take_along_axis(table, position // page, axis=1).astype(np.int64)
    return (blocks * page + position % page).reshape(-1)
