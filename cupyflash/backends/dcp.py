"""Decode context parallelism: one step on all ranks, and what a rank holds of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.backend import CommonAttentionMetadata, KVCacheSpec
from cupyflash.distributed.sharding import Sharding

__all__ = ["check_has_group", "check_ranks_agree", "local_contexts"]


def check_ranks_agree(
    dcp_group: Any, spec: KVCacheSpec, layers: tuple[Any, ...], common: CommonAttentionMetadata
) -> None:
    """Return if all ranks have the same step, types and sizes.

    Parameters
    ----------
    layers : tuple
        What else must be alike; compared by its text.

    Raises
    ------
    DisagreementError, RankLostError
        On every rank, within the group's timeout.
    """
    seen = (
        *(spec.num_kv_heads, spec.head_size, str(np.dtype(spec.storage_type.numpy))),
        *(spec.kv_cache_dtype, spec.block_size, *layers),
        *(common.num_actual_tokens, common.max_query_len, common.max_seq_len),
    )
    state = repr(seen).encode() + b"".join(
        np.ascontiguousarray(common.on_host(name), np.int32).tobytes() + b";"
        for name in ("query_start_loc", "seq_lens")
    )
    dcp_group.agree("the step", state)


def check_has_group(dcp_group: Any) -> None:
    """Return if there is a communicator.

    Raises
    ------
    ValueError
    """
    if dcp_group is None:
        raise ValueError(
            "dcp_world_size > 1 without a dcp_group: give BackendConfig the communicator of "
            "its ranks, or use dcp_world_size=1"
        )


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
