"""Attention that appends to its KV cache first."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import describe_call, flash_attn_varlen_func
from .batched import as_batch, batch_results, check_batch_lse, ragged_arguments
from .kv_cache import reshape_and_cache_flash
from .runtime import env
from .runtime.arrays import array_module, as_array, as_shaped, merge_leading, on_stream, spec_of
from .runtime.call import scale_argument
from .runtime.dtypes import parse_fp8, scalar_type
from .runtime.rules.numbers import non_negative
from .runtime.rules.sequences import check_lengths

__all__ = ["flash_attn_with_kvcache"]


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any,
    block_table: Any = None,
    cache_batch_idx: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_leftpad: Any = None,
    fp8_dtype: str = "e4m3",
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
        [rows, capacity, Hk, D(v)]. Written in place where `k` and `v` are given.
    k, v : array [batch, S_new, Hk, D], [batch, S_new, Hk, Dv], optional
        New tokens, stored after the first ``cache_seqlens`` ones. 16-bit or float32; an fp8 cache
        stores them divided by ``k_descale`` and ``v_descale``, which must then be numbers or [1].
    cache_seqlens : array [batch], int32, or int
        Keys of each request in the cache before the call.
    block_table : array [batch, max_blocks], int32, optional
    cache_batch_idx : array [batch], int32, optional
        The row of each request in a cache without `block_table`; row i for request i if None.
    rotary_cos, rotary_sin, cache_leftpad
        Refused: rotate before the call; left padding is a request that starts later.
    fp8_dtype : str
        What uint8 caches hold.
    out : array [batch, Sq, Hq, Dv], optional
        Where to write. New if None.
    lse : array [batch, Hq, Sq], float32, optional
        Where to write the log-sum-exp.
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
    TypeError, ValueError
        As `flash_attn_varlen_func` and `reshape_and_cache_flash`; also new tokens without room in
        the cache (on a GPU under ``CUPYFLASH_CHECK=1`` only).
    NotImplementedError
        Rotary embedding and left padding.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise NotImplementedError("rotary_cos, rotary_sin: rotate q and k before the call")
    if cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad: let the request start at its first key instead")
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together; pass both or neither")
    stream = options.get("stream")
    q, k_cache, v_cache = (
        as_batch(name, array, stream)
        for name, array in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    )
    batch = q.shape[0]
    check_batch_lse(lse, (batch, q.shape[2], q.shape[1]), out)
    with on_stream(q, stream, "lengths of a batch"):
        lengths = _cache_lengths(cache_seqlens, q, batch)
        table = _table(block_table, cache_batch_idx, k_cache, batch)
        arguments = ragged_arguments(
            q, k_cache, v_cache, table.shape[1] * k_cache.shape[1], out,
            seqused_k=lengths, block_table=table, fp8_dtype=fp8_dtype,
            return_softmax_lse=return_softmax_lse or lse is not None, **options,
        )  # fmt: skip
        if k is not None:
            k, v = as_batch("k", k, stream), as_batch("v", v, stream)
            describe_call(**arguments)  # an error of the attention call comes before the append
            scales = (options.get("k_descale"), options.get("v_descale"))
            _append(k, v, k_cache, v_cache, lengths, table, fp8_dtype, scales, stream)
            arguments["seqused_k"] = lengths + np.int32(k.shape[1])
        found = flash_attn_varlen_func(**arguments)
        return batch_results(found, q.shape, out, lse, return_softmax_lse)


def _cache_lengths(cache_seqlens: Any, q: Any, batch: int) -> Any:
    if isinstance(cache_seqlens, (int, np.integer)):
        length = non_negative("cache_seqlens", cache_seqlens)
        if length >= 1 << 31:
            raise ValueError(f"cache_seqlens={length} must be below 2147483648")
        return array_module(q).full(batch, length, np.int32)
    lengths = as_array(cache_seqlens, "cache_seqlens")
    check_lengths("cache_seqlens", spec_of(lengths), batch)
    return lengths


def _table(block_table: Any, cache_batch_idx: Any, k_cache: Any, batch: int) -> Any:
    """The block table; a cache of one row a request is one of one block a request."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("block_table and cache_batch_idx exclude each other; drop one")
        return as_shaped(block_table, "block_table", 2)
    if cache_batch_idx is not None:
        rows = as_array(cache_batch_idx, "cache_batch_idx")
        check_lengths("cache_batch_idx", spec_of(rows), batch)
        return rows[:, None]
    if k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} rows and q {batch} requests; they must be the same "
            "without block_table or cache_batch_idx"
        )
    return array_module(k_cache).arange(batch, dtype=np.int32)[:, None]


def _append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    table: Any,
    fp8_dtype: str,
    scales: tuple[Any, Any],
    stream: Any,
) -> None:
    """Write the new tokens right behind each request's keys."""
    if k.shape[:2] != v.shape[:2] or k.shape[0] != lengths.shape[0]:
        raise ValueError(
            f"k has shape {k.shape} and v {v.shape}; they must be [{lengths.shape[0]}, S_new, Hk, "
            "D] and [..., Dv]"
        )
    kind = scalar_type(k_cache.dtype)
    is_fp8 = k_cache.dtype == np.uint8 or (kind is not None and kind.is_fp8)
    spelling = fp8_dtype if k_cache.dtype == np.uint8 else k_cache.dtype.name
    write_scales: list[Any] = [1.0, 1.0]
    if is_fp8:
        parse_fp8(spelling)
        write_scales = [_write_scale(n, s) for n, s in zip("kv", scales, strict=True)]
    slots = _append_slots(lengths, table, k.shape[1], k_cache.shape)
    reshape_and_cache_flash(
        merge_leading(k, "k", copy=True), merge_leading(v, "v", copy=True), k_cache, v_cache,
        slots, spelling if is_fp8 else "auto", *write_scales, stream=stream,
    )  # fmt: skip


def _write_scale(operand: str, descale: Any) -> Any:
    scale = scale_argument(f"{operand}_descale", descale)
    if scale is None or isinstance(scale, float) or scale.shape in ((), (1,)):
        return scale
    raise ValueError(
        f"{operand}_descale has shape {scale.shape}: one scale writes the new tokens of all "
        "requests, so pass a number or [1]; or write them by reshape_and_cache_flash"
    )


def _append_slots(lengths: Any, table: Any, new: int, cache_shape: tuple[int, ...]) -> Any:
    """Slots [batch * S_new], int64, of the new tokens."""
    module = array_module(lengths)
    num_blocks, page = cache_shape[:2]
    if table.ndim != 2 or table.shape[0] != lengths.shape[0] or table.dtype != np.int32:
        raise ValueError(
            f"block_table is {table.dtype} {table.shape}; it must be int32 "
            f"[{lengths.shape[0]}, max_blocks]"
        )
    position = lengths[:, None].astype(np.int64) + module.arange(new)
    room = table.shape[1] * page
    read = position.size and (module is np or env.check())
    if read and (position.max() >= room or position.min() < 0):
        raise ValueError(
            f"new tokens reach positions {position.min()}..{position.max()} of a request, but "
            f"its blocks hold 0..{room - 1}"
        )
    blocks = module.take_along_axis(table, position // page, axis=1).astype(np.int64)
    if read and not 0 <= blocks.min() <= blocks.max() < num_blocks:
        raise ValueError(
            f"block_table sends new tokens to blocks {blocks.min()}..{blocks.max()}, but the cache "
            f"has 0..{num_blocks - 1}"
        )
    return (blocks * page + position % page).reshape(-1)
