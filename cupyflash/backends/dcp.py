"""Decode context parallelism: one step on all ranks, and what a rank holds of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.backend import CommonAttentionMetadata, KVCacheSpec
from cupyflash.distributed.sharding import Sharding

from .flash_attn_metadata import FlashAttentionMetadata
from .layer_group import LayerGroup

__all__ = ["check_ranks_agree", "local_contexts"]


def check_ranks_agree(
    dcp_group: Any,
    spec: KVCacheSpec,
    layers: LayerGroup,
    step: FlashAttentionMetadata,
    common: CommonAttentionMetadata,
) -> None:
    """Return if all ranks have the same step, types and sizes.

    Raises
    ------
    DisagreementError, RankLostError
        On every rank, within the group's timeout.
    """
    seen = (
        *(spec.num_kv_heads, spec.head_size, str(np.dtype(spec.storage_type.numpy))),
        *(spec.kv_cache_dtype, spec.block_size, layers.num_heads_q, layers.has_softcap),
        *(step.num_actual_tokens, step.max_query_len, step.max_seq_len, step.max_num_splits),
        *(step.causal, step.batch_invariant),
    )
    state = repr(seen).encode() + b"".join(
        np.ascontiguousarray(common.on_host(name), np.int32).tobytes() + b";"
        for name in ("query_start_loc", "seq_lens")
    )
    dcp_group.agree("the step", state)


def local_contexts(
    sharding: Sharding, rank: int, common: CommonAttentionMetadata, captured: bool
) -> tuple[Any, int]:
    """Tokens of each request's context on a rank: array [R], int32; and their bound on any rank.

    The bound is 0 where no request has a context, the same on all ranks since it comes from whole
    lengths. A captured step always reads contexts: the next replay may have one.
    """
    local = sharding.local_lengths(common.compute_num_computed_tokens(), rank)
    queries = np.diff(common.on_host("query_start_loc"))
    has_context = captured or bool((common.on_host("seq_lens") > queries).any())
    return local, sharding.max_local_length(common.max_seq_len) if has_context else 0
