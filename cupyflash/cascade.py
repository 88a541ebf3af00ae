"""Attention in two levels: a prefix that all requests share, and each request's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .attention import describe_call, flash_attn_varlen_func
from .merge import merge_attn_states
from .prefix_tree import PrefixTree
from .runtime import env
from .runtime.arrays import array_module, as_array, as_shaped, on_stream, place, spec_of
from .runtime.call import scale_argument
from .runtime.rules.numbers import non_negative
from .runtime.rules.operands import check_operand
from .runtime.rules.score import window
from .runtime.shared_launch import Sharing
from .shared_prefix import PrefixSchedule, attend_once, sharing_of_tree
from .values import check_prefix_is_seen, check_values

__all__ = ["cascade_attention"]


def cascade_attention(
    output: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    cu_query_lens: Any,
    max_query_len: int,
    cu_prefix_query_lens: Any,
    prefix_kv_lens: Any,
    suffix_kv_lens: Any,
    max_kv_len: int,
    softmax_scale: float | None,
    alibi_slopes: Any,
    sliding_window: tuple[int, int] | None,
    logits_soft_cap: float | None,
    block_table: Any,
    common_prefix_len: int,
    max_num_splits: int,
    fa_version: int | None,
    prefix_scheduler_metadata: Any = None,
    suffix_scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    s_aux: Any = None,
    *,
    fp8_dtype: str = "e4m3",
    q_fp8_dtype: str | None = None,
    prefix_tree: PrefixTree | None = None,
    stream: Any = None,
) -> Any:
    """Causal attention over paged keys whose first blocks requests share.

    The shared blocks are read once for all queries, without a mask; each request's own keys
    causally; the two states are merged. On compute capability 9.0 this is one launch; elsewhere,
    and where that kernel does not take a call, it is two and a merge. Where two passes cannot share
    the prefix (ALiBi or a window, which count from each request's own position, or descales that
    may differ from request to request) each request attends to all of its keys in one pass, with
    the same result.

    Parameters
    ----------
    output : array [tokens, Hq, Dv]
        Written in place; rows past ``cu_query_lens[-1]`` are left as they are.
    query : array [tokens, Hq, D]
    key_cache, value_cache : array [num_blocks, block_size, Hk, D(v)]
    cu_query_lens : array [batch + 1], int32
    max_query_len : int
        Bound of the queries of a request.
    cu_prefix_query_lens : array [2], int32
        ``[0, cu_query_lens[-1]]``: all queries are one sequence to the prefix.
    prefix_kv_lens : array [1], int32
        ``[common_prefix_len]``.
    suffix_kv_lens : array [batch], int32
        Keys of each request behind the prefix.
    max_kv_len : int
        Bound of the keys of a request, the prefix included.
    softmax_scale : float or None
        As `flash_attn_varlen_func`.
    alibi_slopes : array [Hq] or [batch, Hq], float32, or None
    sliding_window : (int, int) or None
        Keys to the left and right that a query sees; (-1, -1) = all.
    logits_soft_cap : float or None
        0 or None = off.
    block_table : array [batch, max_blocks], int32
        Its first ``common_prefix_len / block_size`` columns are the same in every row.
    common_prefix_len : int
        Tokens; a positive multiple of the block size.
    max_num_splits : int
        ``num_splits`` of every pass.
    fa_version : int or None
    prefix_scheduler_metadata, suffix_scheduler_metadata : SchedulerMetadata, optional
        Of the two passes. Refused where two passes cannot share the prefix. The first may be a
        `PrefixSchedule` (or None), which spares the one launch its own.
    q_descale, k_descale, v_descale : array [batch, Hk] or [1], float32, or number, optional
        Shared where it is a number, [1], or has stride 0 over the batch.
    s_aux : array [Hq], optional
        Sink; merged once.
    fp8_dtype : str
        What uint8 caches hold.
    q_fp8_dtype : str, optional
        What a uint8 query holds, if it differs.
    prefix_tree : PrefixTree, optional
        Which requests share what, instead of a prefix of all: `common_prefix_len` is 0 then,
        ``suffix_kv_lens`` are all keys of each request, and ``cu_prefix_query_lens`` and
        ``prefix_kv_lens`` are not read. The result is that of attention; where the kernel does not
        take the call, nothing is shared. A request that does not see all that its group shares
        reads its keys by itself.
    stream : int or stream, optional
        The current stream of the arrays' device if None. The CPU has none.

    Returns
    -------
    array [tokens, Hq, Dv]
        ``output``.

    Raises
    ------
    ValueError
        A prefix that is not whole blocks, or that some query does not see to its end (on a GPU
        under ``CUPYFLASH_CHECK=1`` only), or schedules without a shared prefix.
    TypeError, ValueError, NotImplementedError
        As `flash_attn_varlen_func`.
    """
    given = output
    output, query, key_cache, value_cache = (
        as_shaped(array, name, ndim, stream)
        for name, array, ndim in (
            ("output", output, 3), ("query", query, 3), ("key_cache", key_cache, 4),
            ("value_cache", value_cache, 4),
        )
    )  # fmt: skip
    if prefix_tree is None:
        blocks = _prefix_blocks(key_cache, common_prefix_len, max_kv_len)
    else:
        blocks = _no_prefix(common_prefix_len, prefix_scheduler_metadata)
    schedule = None
    if isinstance(prefix_scheduler_metadata, PrefixSchedule):
        schedule, prefix_scheduler_metadata = prefix_scheduler_metadata, None
    sides = window(None if sliding_window is None else tuple(sliding_window), False)
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    scales = {name: scale_argument(name, scale, stream) for name, scale in scales.items()}
    common: dict[str, Any] = {
        "q": query,
        "k": key_cache,
        "v": value_cache,
        "softmax_scale": softmax_scale,
        "softcap": 0.0 if logits_soft_cap is None else logits_soft_cap,
        "num_splits": max_num_splits,
        "fa_version": fa_version,
        "fp8_dtype": fp8_dtype,
        "q_fp8_dtype": q_fp8_dtype,
        "stream": stream,
    }
    own = {"cu_seqlens_q": cu_query_lens, "max_seqlen_q": max_query_len, "out": output, **scales}
    table = as_shaped(block_table, "block_table", 2)
    whole = {
        "max_seqlen_k": max_kv_len, "block_table": table, "causal": True, "window_size": sides,
        "alibi_slopes": alibi_slopes, "s_aux": s_aux, **own, **common,
    }  # fmt: skip
    if prefix_tree is not None:
        _by_tree(prefix_tree, whole, suffix_kv_lens, suffix_scheduler_metadata, schedule)
        return given
    sharing = Sharing(common_keys=common_prefix_len, added_keys=common_prefix_len)
    whole_call = {**whole, "seqused_k": suffix_kv_lens}
    if alibi_slopes is not None or sides != (-1, -1) or not all(map(_is_shared, scales.values())):
        if prefix_scheduler_metadata is not None or suffix_scheduler_metadata is not None:
            raise ValueError(
                "scheduler metadata of two passes, but ALiBi, a window, or descales of each "
                "request leave no prefix to share; drop both schedules"
            )
        if _in_one(sharing, whole_call, (), schedule):
            return given
        lengths = as_array(suffix_kv_lens, "suffix_kv_lens")
        with on_stream(lengths, stream, "lengths with the prefix"):
            lengths = lengths + np.int32(common_prefix_len)
        flash_attn_varlen_func(seqused_k=lengths, **whole)
        return given
    prefix = {
        "max_seqlen_q": query.shape[0], "cu_seqlens_q": cu_prefix_query_lens,
        "max_seqlen_k": common_prefix_len, "seqused_k": prefix_kv_lens,
        "block_table": table[:1, :blocks], "s_aux": s_aux,
        "scheduler_metadata": prefix_scheduler_metadata,
        **{name: _of_one_request(scale) for name, scale in scales.items()}, **common,
    }  # fmt: skip
    suffix = {
        "max_seqlen_k": max_kv_len - common_prefix_len, "seqused_k": suffix_kv_lens,
        "block_table": table[:, blocks:], "causal": True,
        "scheduler_metadata": suffix_scheduler_metadata, **own, **common,
    }  # fmt: skip
    if not _in_one(sharing, whole_call, (prefix, suffix), schedule):
        _two_levels(output, prefix, suffix, stream)
    return given


def _in_one(
    sharing: Sharing,
    whole: dict[str, Any],
    passes: Sequence[dict[str, Any]],
    schedule: PrefixSchedule | None,
) -> bool:
    """One launch for both levels, where a kernel does it; ``passes`` are what it replaces."""
    call = describe_call(**whole)
    if call.on_host:
        return False
    for one in passes:  # a schedule that is not needed must fit all the same
        if one["scheduler_metadata"] is not None:
            describe_call(**one)
    if env.check():
        check_values(call)
        if passes:
            check_prefix_is_seen(describe_call(**passes[-1]), sharing.common_keys)
    return not attend_once(call, sharing, whole["fa_version"], whole["stream"], schedule)


def _by_tree(
    tree: PrefixTree, whole: dict[str, Any], lengths: Any, scheduler_metadata: Any, schedule: Any
) -> None:
    """Attention to all keys, those of a tree read once where there is a kernel for it."""
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"prefix_tree is {type(tree).__name__}; make one by find_prefix_tree")
    whole = {**whole, "seqused_k": lengths, "scheduler_metadata": scheduler_metadata}
    call = describe_call(**whole)
    if call.problem.batch != tree.batch:
        raise ValueError(
            f"prefix_tree is of {tree.batch} requests, the call of {call.problem.batch}"
        )
    if not call.on_host:
        place(("q", "prefix_tree"), (call.arrays.q, tree.buffer), whole["stream"])
        if env.check():
            check_values(call)
        version, stream = whole["fa_version"], whole["stream"]
        if not attend_once(call, sharing_of_tree(tree), version, stream, schedule):
            return
    flash_attn_varlen_func(**whole)


def _no_prefix(common_prefix_len: int, prefix_scheduler_metadata: Any) -> int:
    """What a call with a tree has of a prefix of all."""
    if common_prefix_len or not isinstance(prefix_scheduler_metadata, PrefixSchedule | None):
        raise ValueError(
            f"prefix_tree with common_prefix_len={common_prefix_len} and prefix_scheduler_metadata="
            f"{prefix_scheduler_metadata!r}: the tree says what is shared; use 0 and None"
        )
    return 0


def _prefix_blocks(key_cache: Any, common_prefix_len: int, max_kv_len: int) -> int:
    """Blocks of the prefix."""
    block_size = check_operand("key_cache", spec_of(key_cache), "[num_blocks, block_size, Hk, D]")[
        1
    ]
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


def _is_shared(scale: Any) -> bool:
    """Whether a descale is known, without a read, to be the same for every request."""
    if not hasattr(scale, "shape") or scale.ndim < 2:
        return True
    return bool(scale.shape[0] <= 1 or scale.strides[0] == 0)


def _of_one_request(scale: Any) -> Any:
    """A shared descale for the prefix, which is one sequence: [1, Hk] of [batch, Hk]."""
    return scale[:1] if hasattr(scale, "shape") and scale.ndim == 2 else scale


def _two_levels(output: Any, prefix: dict[str, Any], suffix: dict[str, Any], stream: Any) -> None:
    """Both passes, given by their arguments, and their merge in ``output``.

    Rows of no request keep what ``output`` holds: to the merge their prefix is empty, and their
    suffix is a state of weight one.
    """
    call = describe_call(**suffix)  # its errors come before anything is written
    if call.on_host or env.check():
        check_prefix_is_seen(call, prefix["max_seqlen_k"])
    query = prefix["q"]
    module, (tokens, heads) = array_module(query), query.shape[:2]
    with on_stream(query, stream, "the states of two levels"):
        prefix_lse = module.full((heads, tokens), -np.inf, np.float32)
        suffix_lse = module.zeros((heads, tokens), np.float32)
    prefix_out, _ = flash_attn_varlen_func(lse=prefix_lse, return_softmax_lse=True, **prefix)
    flash_attn_varlen_func(lse=suffix_lse, **suffix)
    merge_attn_states(output, prefix_out, prefix_lse, output, suffix_lse, stream=stream)
