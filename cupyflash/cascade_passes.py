"""The launches of `cascade_attention`: one where a kernel reads shared keys once, else two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .attention import describe_call, flash_attn_varlen_func
from .merge import merge_attn_states
from .prefix_tree import PrefixTree
from .runtime import env
from .runtime.arrays import array_module, as_array, as_shaped, on_stream, place, spec_of
from .runtime.call import scale_argument
from .runtime.placement import check_apart
from .runtime.rules.operands import check_operand
from .runtime.rules.prefix import prefix_blocks
from .runtime.rules.score import window
from .runtime.shared_launch import Sharing
from .shared_prefix import PrefixSchedule, attend_once, sharing_of_tree
from .values import check_prefix_is_seen, check_shared_blocks, check_values

__all__ = ["CascadeArrays", "CascadeOptions", "attend"]


class CascadeArrays(NamedTuple):
    """What of a call lies in memory and is read by one launch; as `cascade_attention` names it."""

    output: Any
    query: Any
    key_cache: Any
    value_cache: Any
    cu_query_lens: Any
    suffix_kv_lens: Any
    block_table: Any
    alibi_slopes: Any
    s_aux: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any


class CascadeOptions(NamedTuple):
    """What of a call is known on the host; as `cascade_attention` names it."""

    max_query_len: int
    max_kv_len: int
    softmax_scale: float | None
    sliding_window: tuple[int, ...] | None
    logits_soft_cap: float | None
    common_prefix_len: int
    max_num_splits: int
    fa_version: int | None
    fp8_dtype: str
    q_fp8_dtype: str | None


def attend(
    given: CascadeArrays,
    options: CascadeOptions,
    prefix_lengths: tuple[Any, Any],
    schedules: tuple[Any, Any],
    tree: PrefixTree | None,
    schedule: PrefixSchedule | None,
    stream: Any,
) -> bool:
    """Validate a call and queue it.

    Parameters
    ----------
    given : CascadeArrays
    options : CascadeOptions
    prefix_lengths : tuple of array
        ``cu_prefix_query_lens`` and ``prefix_kv_lens``.
    schedules : tuple of SchedulerMetadata or None
        Of the two passes.
    tree : PrefixTree, optional
    schedule : PrefixSchedule, optional
    stream : int or stream, optional

    Returns
    -------
    bool
        Whether one launch reads what is shared once.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `cascade_attention`.
    """
    output, query, key_cache, value_cache = (
        as_shaped(array, name, ndim, stream)
        for array, name, ndim in zip(given, CascadeArrays._fields[:4], (3, 3, 4, 4), strict=False)
    )
    prefix_len, max_kv_len = options.common_prefix_len, options.max_kv_len
    for_prefix, for_suffix = schedules
    if tree is None:
        pages = check_operand("key_cache", spec_of(key_cache), "[num_blocks, block_size, Hk, D]")
        blocks = prefix_blocks(prefix_len, pages[1], max_kv_len)
    else:
        blocks = _no_prefix(prefix_len, for_prefix)
    sides = window(options.sliding_window, False)
    names = CascadeArrays._fields[-3:]
    scales = {name: scale_argument(name, getattr(given, name), stream) for name in names}
    common: dict[str, Any] = {
        "q": query,
        "k": key_cache,
        "v": value_cache,
        "softmax_scale": options.softmax_scale,
        "softcap": 0.0 if options.logits_soft_cap is None else options.logits_soft_cap,
        "num_splits": options.max_num_splits,
        "fa_version": options.fa_version,
        "fp8_dtype": options.fp8_dtype,
        "q_fp8_dtype": options.q_fp8_dtype,
        "stream": stream,
    }
    own = {
        "cu_seqlens_q": given.cu_query_lens, "max_seqlen_q": options.max_query_len, "out": output,
        **scales,
    }  # fmt: skip
    table = as_shaped(given.block_table, "block_table", 2)
    if table.shape[1] < blocks:
        raise ValueError(
            f"block_table has {table.shape[1]} columns; common_prefix_len={prefix_len} takes "
            f"{blocks} blocks"
        )
    lengths = given.suffix_kv_lens
    whole = {
        "max_seqlen_k": max_kv_len, "block_table": table, "causal": True, "window_size": sides,
        "alibi_slopes": given.alibi_slopes, "s_aux": given.s_aux, **own, **common,
    }  # fmt: skip
    if tree is not None:
        return _by_tree(tree, whole, lengths, for_suffix, schedule)
    sharing = Sharing(common_keys=prefix_len, added_keys=prefix_len)
    whole_call = {**whole, "seqused_k": lengths}
    two_share = given.alibi_slopes is None and sides == (-1, -1)
    if not (two_share and all(map(_is_shared, scales.values()))):
        if for_prefix is not None or for_suffix is not None:
            raise ValueError(
                "scheduler metadata of two passes, but ALiBi, a window, or descales of each "
                "request leave no prefix to share; drop both schedules"
            )
        if _in_one(sharing, whole_call, (), schedule):
            return True
        lengths = as_array(lengths, "suffix_kv_lens")
        with on_stream(lengths, stream, "lengths with the prefix"):
            lengths = lengths + np.int32(prefix_len)
        flash_attn_varlen_func(seqused_k=lengths, **whole)
        return False
    prefix = {
        "max_seqlen_q": query.shape[0], "cu_seqlens_q": prefix_lengths[0],
        "max_seqlen_k": prefix_len, "seqused_k": prefix_lengths[1],
        "block_table": table[:1, :blocks], "s_aux": given.s_aux, "scheduler_metadata": for_prefix,
        **{name: _of_one_request(scale) for name, scale in scales.items()}, **common,
    }  # fmt: skip
    suffix = {
        "max_seqlen_k": max_kv_len - prefix_len, "seqused_k": lengths,
        "block_table": table[:, blocks:], "causal": True, "scheduler_metadata": for_suffix,
        **own, **common,
    }  # fmt: skip
    if _in_one(sharing, whole_call, (prefix, suffix), schedule):
        return True
    _two_levels(output, prefix, suffix, stream)
    return False


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
) -> bool:
    """Attention to all keys, those of a tree read once where there is a kernel for it: whether."""
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"prefix_tree is {type(tree).__name__}; make one by find_prefix_tree")
    whole = {**whole, "seqused_k": lengths, "scheduler_metadata": scheduler_metadata}
    call = describe_call(**whole)
    if call.problem.batch != tree.batch:
        raise ValueError(
            f"prefix_tree is of {tree.batch} requests, the call of {call.problem.batch}"
        )
    if call.on_host:
        check_shared_blocks(tree.nodes, call.problem.page_size)
    check_apart(("output", "prefix_tree"), call.arrays.out, tree.buffer)
    if not call.on_host:
        place(("q", "prefix_tree"), (call.arrays.q, tree.buffer), whole["stream"])
        if env.check():
            check_values(call)
            check_shared_blocks(tree.nodes, call.problem.page_size)
        version, stream = whole["fa_version"], whole["stream"]
        if not attend_once(call, sharing_of_tree(tree), version, stream, schedule):
            return True
    flash_attn_varlen_func(**whole)
    return False


def _no_prefix(common_prefix_len: int, prefix_scheduler_metadata: Any) -> int:
    """What a call with a tree has of a prefix of all."""
    if common_prefix_len or not isinstance(prefix_scheduler_metadata, PrefixSchedule | None):
        raise ValueError(
            f"prefix_tree with common_prefix_len={common_prefix_len} and prefix_scheduler_metadata="
            f"{prefix_scheduler_metadata!r}: the tree says what is shared; use 0 and None"
        )
    return 0


def _is_shared(scale: Any) -> bool:
    """Whether a descale is known, without a read, to be the same for every request."""
    if not hasattr(scale, "shape") or scale.ndim < 2:
        return True
    return bool(scale.shape[0] <= 1 or scale.strides[0] == 0)


def _of_one_request(scale: Any) -> Any:
    """A shared descale for the prefix, which is one sequence: [1, Hk] of [batch, Hk]."""
    return scale[:1] if hasattr(scale, "shape") and scale.ndim == 2 else scale


def _check_lengths(prefix: dict[str, Any], tokens: int) -> None:
    """Refuse lengths of the prefix that are not those of the call, which one launch goes by."""
    asked = describe_call(**prefix).arrays
    for name, given, right in (
        ("cu_prefix_query_lens", asked.cu_seqlens_q, [0, tokens]),
        ("prefix_kv_lens", asked.seqused_k, [prefix["max_seqlen_k"]]),
    ):
        if given.tolist() != right:
            raise ValueError(f"{name}={given.tolist()}; in this call it must be {right}")


def _two_levels(output: Any, prefix: dict[str, Any], suffix: dict[str, Any], stream: Any) -> None:
    """Both passes, given by their arguments, and their merge in ``output``.

    Rows of no request keep what ``output`` holds: to the merge their prefix is empty, and their
    suffix is a state of weight one.
    """
    call = describe_call(**suffix)  # its errors come before anything is written
    if call.on_host or env.check():
        check_prefix_is_seen(call, prefix["max_seqlen_k"])
    if call.on_host:
        _check_lengths(prefix, int(call.arrays.cu_seqlens_q[-1]))
    query = prefix["q"]
    module, (tokens, heads) = array_module(query), query.shape[:2]
    with on_stream(query, stream, "the states of two levels"):
        prefix_lse = module.full((heads, tokens), -np.inf, np.float32)
        suffix_lse = module.zeros((heads, tokens), np.float32)
    prefix_out, _ = flash_attn_varlen_func(lse=prefix_lse, return_softmax_lse=True, **prefix)
    flash_attn_varlen_func(lse=suffix_lse, **suffix)
    merge_attn_states(output, prefix_out, prefix_lse, output, suffix_lse, stream=stream)
