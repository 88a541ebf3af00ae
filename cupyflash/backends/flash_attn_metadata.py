"""What every layer of a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupyflash.scheduler_metadata import SchedulerMetadata
from cupyflash.shared_prefix import PrefixSchedule

__all__ = ["FlashAttentionMetadata"]

Array = Any  # NumPy or CuPy


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttentionMetadata:
    """One step, for the layers of one KV cache group: R requests, T query tokens.

    Attributes
    ----------
    num_actual_tokens : int
        T.
    max_query_len, max_seq_len : int
        Upper bounds over the requests.
    query_start_loc : array [R + 1], int32
    seq_lens : array [R], int32
    block_table : array [R, max_blocks], int32
    slot_mapping : array [tokens to store], int32 or int64
    use_cascade : bool
        The first ``common_prefix_len`` keys are read once for all requests.
    common_prefix_len : int
    num_cascade_tokens : int
        Query tokens that belong to a request, padding left out.
    cu_prefix_query_lens : array [2], int32
        ``[0, num_cascade_tokens]``.
    prefix_kv_lens : array [1], int32
    suffix_kv_lens : array [R], int32
        Keys of each request behind the prefix.
    max_dcp_context_kv_len : int, optional
        Bound of ``dcp_context_kv_lens``; 0 = no request has a context.
    dcp_context_kv_lens : array [R], int32, optional
        Keys of each request's context on this context-parallel rank.
    dcp_group : Communicator, optional
    dcp_combine : str
    scheduler_metadata, prefix_scheduler_metadata : SchedulerMetadata, optional
        With cascade, the first is that of the suffix. The second may be a `PrefixSchedule`, which
        has both.
    max_num_splits : int
        As ``num_splits`` of the calls.
    causal : bool
    batch_invariant : bool
    map_block_table : callable, optional
        How a derived builder makes its block table from the engine's.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Array
    seq_lens: Array
    block_table: Array
    slot_mapping: Array
    use_cascade: bool = False
    common_prefix_len: int = 0
    num_cascade_tokens: int = 0
    cu_prefix_query_lens: Array = None
    prefix_kv_lens: Array = None
    suffix_kv_lens: Array = None
    max_dcp_context_kv_len: int | None = None
    dcp_context_kv_lens: Array = None
    dcp_group: Any = None
    dcp_combine: str = "auto"
    scheduler_metadata: SchedulerMetadata | None = None
    prefix_scheduler_metadata: SchedulerMetadata | PrefixSchedule | None = None
    max_num_splits: int = 0
    causal: bool = True
    batch_invariant: bool = False
    map_block_table: Callable[[Array], Array] | None = None
