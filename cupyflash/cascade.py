"""Attention in two levels: a prefix that all requests share, and each request's own keys."""

from __future__ import annotations

from typing import Any

from .cascade_passes import CascadeArrays, CascadeOptions, attend
from .known_cascade import find_known
from .prefix_tree import PrefixTree
from .runtime.foreign_views import FOREIGN, gpu_views
from .runtime.rules.score import sides
from .shared_prefix import PrefixSchedule

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
    schedule = None
    if isinstance(prefix_scheduler_metadata, PrefixSchedule):
        schedule, prefix_scheduler_metadata = prefix_scheduler_metadata, None
    arrays = CascadeArrays(
        output, query, key_cache, value_cache, cu_query_lens, suffix_kv_lens, block_table,
        alibi_slopes, s_aux, q_descale, k_descale, v_descale,
    )  # fmt: skip
    options = CascadeOptions(
        max_query_len, max_kv_len, softmax_scale, sides(sliding_window), logits_soft_cap,
        common_prefix_len, max_num_splits, fa_version, fp8_dtype, q_fp8_dtype,
    )  # fmt: skip
    passes = prefix_scheduler_metadata, suffix_scheduler_metadata
    known = None
    # `==` would be asked of the elements of an array.
    if prefix_scheduler_metadata is None and suffix_scheduler_metadata is None:
        if type(query) not in FOREIGN:
            known = find_known(arrays, options, prefix_tree, schedule, stream)
        if known is None and (views := gpu_views(arrays, CascadeArrays._fields, stream)):
            arrays = CascadeArrays(*views)
            known = find_known(arrays, options, prefix_tree, schedule, stream)
    if known is None or not known.queue():
        prefix = cu_prefix_query_lens, prefix_kv_lens
        call = arrays, options, prefix, passes, prefix_tree, schedule, stream
        if known is None:
            attend(*call)
        else:
            known.keep(attend, *call)
    return output
