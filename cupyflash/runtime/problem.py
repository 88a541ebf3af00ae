"""What is asked: one attention call, described and validated without reading device memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import rules
from .dtypes import ScalarType
from .rules import ArraySpec

__all__ = ["AttentionProblem", "describe"]


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


@lru_cache(maxsize=4096)
def describe(
    q: ArraySpec,
    k: ArraySpec,
    v: ArraySpec,
    max_seqlen_q: int,
    cu_seqlens_q: ArraySpec,
    max_seqlen_k: int,
    cu_seqlens_k: ArraySpec | None,
    seqused_k: ArraySpec | None,
    block_table: ArraySpec | None,
    out: ArraySpec | None,
    lse: ArraySpec | None,
    alibi_slopes: ArraySpec | None,
    s_aux: ArraySpec | None,
    descales: tuple[Any, Any, Any],
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int] | None,
    softcap: float,
    fp8_dtype: str,
    q_fp8_dtype: str | None,
    return_softmax_lse: bool,
    num_splits: int,
    batch_invariant: bool,
    on_host: bool,
) -> AttentionProblem:
    """The problem that a call states, validated; the arguments are those of the call.

    Arrays come as `rules.ArraySpec`, so equal calls are described once.

    Raises
    ------
    TypeError, ValueError
        What was given, the rule that it breaks, and what would work.
    """
    paged = block_table is not None
    rules.check_sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    batch = cu_seqlens_q.shape[0] - 1
    total_q, heads_q, head_dim = rules.check_rank("q", q, 3, "[total_q, Hq, D]")
    layout = "[num_blocks, block_size, Hk, D]" if paged else "[total_k, Hk, D]"
    *rows_k, heads_kv, head_dim_k = rules.check_rank("k", k, 4 if paged else 3, layout)
    *rows_v, heads_v, head_dim_v = rules.check_rank("v", v, 4 if paged else 3, layout)
    rules.check_heads(heads_q, heads_kv, heads_v, rows_k, rows_v)
    rules.check_head_dims(head_dim, head_dim_k, head_dim_v)
    q_type, kv_type = rules.storage_types(q, k, v, fp8_dtype, q_fp8_dtype, on_host)
    out_type = rules.output_type(q_type, out)
    rules.check_output("out", out, (total_q, heads_q, head_dim_v))
    rules.check_output("lse", lse, (heads_q, total_q))
    rules.check_lse_type(lse)
    left, right = rules.window(window_size, causal)
    rules.check_modifiers(alibi_slopes, s_aux, heads_q, batch)
    rules.check_descales(descales, q_type, kv_type, batch, heads_kv)
    rules.check_bound("max_seqlen_q", max_seqlen_q)
    rules.check_bound("max_seqlen_k", max_seqlen_k)
    rules.check_bound("num_splits", num_splits)
    rules.check_softcap(softcap)
    return AttentionProblem(
        batch=batch,
        total_q=total_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q_type=q_type,
        kv_type=kv_type,
        out_type=out_type,
        page_size=rules.page_size(k) if paged else None,
        max_blocks=0 if block_table is None else block_table.shape[1],
        window_left=left,
        window_right=right,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        has_alibi=alibi_slopes is not None,
        alibi_per_batch=alibi_slopes is not None and len(alibi_slopes.shape) == 2,
        has_sink=s_aux is not None,
        has_q_descale=descales[0] is not None,
        has_kv_descale=descales[1] is not None or descales[2] is not None,
        has_seqused_k=seqused_k is not None,
        wants_lse=return_softmax_lse or lse is not None,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        cp_world_size=1,
        cp_rank=0,
    )
