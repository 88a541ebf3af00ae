"""What is asked: one attention call, described and validated without reading device memory."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import ScalarType

__all__ = ["AttentionProblem"]


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One validated attention call: shapes, types and options, no arrays.

    Attributes
    ----------
    batch, total_q, max_seqlen_q, max_seqlen_k : int
        Requests, query tokens in all, and upper bounds of the lengths of one request.
    num_heads_q, num_heads_kv, head_dim, head_dim_v : int
        ``Hq``, ``Hk``, ``D`` of q and k, ``Dv`` of v.
    q_type, kv_type, out_type : ScalarType
    page_size : int or None
        Tokens a cache block; None for packed K and V.
    max_blocks : int
        Columns of ``block_table``; 0 for packed K and V.
    window_left, window_right : int
        Inclusive reach of a query to both sides, -1 = open. Causal is ``window_right == 0``.
    softmax_scale, softcap : float
        ``softcap`` 0 = off.
    has_alibi, alibi_per_batch, has_sink, has_q_descale, has_kv_descale : bool
    has_seqused_k : bool
    wants_lse : bool
    num_splits : int
        0 = planned, 1 = never split, n = upper bound.
    batch_invariant : bool
    cp_world_size, cp_rank : int
        Context-parallel group; 1 and 0 without one.
    """

    batch: int
    total_q: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    q_type: ScalarType
    kv_type: ScalarType
    out_type: ScalarType
    page_size: int | None
    max_blocks: int
    window_left: int
    window_right: int
    softmax_scale: float
    softcap: float
    has_alibi: bool
    alibi_per_batch: bool
    has_sink: bool
    has_q_descale: bool
    has_kv_descale: bool
    has_seqused_k: bool
    wants_lse: bool
    num_splits: int
    batch_invariant: bool
    cp_world_size: int
    cp_rank: int

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def causal(self) -> bool:
        return self.window_right == 0
