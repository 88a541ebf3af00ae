"""What is asked: one attention call, described and validated without reading device memory."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from .arrays import ArraySpec, AttentionArrays
from .dtypes import ScalarType
from .rules.latent import check_latent
from .rules.operands import (
    check_head_dims,
    check_heads,
    check_operand,
    check_result,
    operand_types,
    output_type,
)
from .rules.score import (
    check_alibi,
    check_descales,
    check_scale,
    check_sink,
    check_softcap,
    window,
)
from .rules.sequences import check_sequences

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
    has_q_v : bool
        Latent attention: queries have a part of size ``Dv`` too, which meets v.
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
    has_q_v: bool
    wants_lse: bool
    num_splits: int
    batch_invariant: bool
    cp_world_size: int
    cp_rank: int
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        """Made once: a warm call finds what was planned for its problem by hash and identity."""
        return self._hash

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def causal(self) -> bool:
        return self.window_right == 0


@lru_cache(maxsize=4096)
def describe(
    arrays: tuple[Any, ...],
    descales: tuple[Any, ...],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int] | None,
    softcap: float,
    fp8_dtype: str,
    q_fp8_dtype: str | None,
    wants_lse: bool,
    num_splits: int,
    batch_invariant: bool,
    on_host: bool,
) -> AttentionProblem:
    """The validated problem that a call states; equal calls are described once.

    Parameters
    ----------
    arrays : tuple
        ``arrays.specs`` of an `AttentionArrays`.
    descales : tuple
        For q, k and v: None, a number, or the spec of an array.
    on_host : bool
        The call is computed with NumPy.

    Raises
    ------
    TypeError, ValueError
        What was given, the rule that it breaks, and what would work.
    """
    a = AttentionArrays(*(None if spec is None else ArraySpec(*spec) for spec in arrays))
    paged = a.block_table is not None
    batch = check_sequences(a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_k, a.block_table)
    total_q, heads_q, head_dim = check_operand("q", a.q, "[total_q, Hq, D]")
    rows = "num_blocks, block_size" if paged else "total_k"
    *rows_k, heads_kv, head_dim_k = check_operand("k", a.k, f"[{rows}, Hk, D]")
    *rows_v, heads_v, head_dim_v = check_operand("v", a.v, f"[{rows}, Hk, Dv]")
    check_heads(heads_q, heads_kv, heads_v, rows_k, rows_v)
    check_head_dims(head_dim, head_dim_k, head_dim_v, a.q_v is not None)
    if paged and rows_k[1] < 1:
        raise ValueError(f"k has shape {a.k.shape}: a block must hold at least 1 token")
    q_type, kv_type = operand_types(a.q, a.k, a.v, fp8_dtype, q_fp8_dtype, on_host)
    check_latent(a.q_v, (total_q, heads_q, head_dim_v), q_type, kv_type, softmax_scale)
    out_type = output_type(q_type, a.out)
    check_result("out", a.out, (total_q, heads_q, head_dim_v))
    check_result("lse", a.lse, (heads_q, total_q))
    if a.lse is not None and a.lse.dtype != np.float32:
        raise TypeError(f"lse is {a.lse.dtype}; it must be float32")
    left, right = window(window_size, causal)
    check_softcap(softcap)
    check_alibi(a.alibi_slopes, batch, heads_q)
    check_sink(a.s_aux, heads_q)
    check_descales(descales, q_type, kv_type, batch, heads_kv)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    check_scale(scale, descales)
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
        page_size=rows_k[1] if paged else None,
        max_blocks=a.block_table.shape[1] if paged else 0,
        window_left=left,
        window_right=right,
        softmax_scale=scale,
        softcap=softcap,
        has_alibi=a.alibi_slopes is not None,
        alibi_per_batch=a.alibi_slopes is not None and len(a.alibi_slopes.shape) == 2,
        has_sink=a.s_aux is not None,
        has_q_descale=descales[0] is not None,
        has_kv_descale=descales[1] is not None or descales[2] is not None,
        has_seqused_k=a.seqused_k is not None,
        has_q_v=a.q_v is not None,
        wants_lse=wants_lse or a.lse is not None,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        cp_world_size=1,
        cp_rank=0,
    )
