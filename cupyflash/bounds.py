"""What is known of attention calls before there are any: geometry, types, upper bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .runtime.dtypes import BF16, parse_scalar_type
from .runtime.problem import AttentionProblem
from .runtime.rules.numbers import MOST_TOKENS, non_negative, token_bound
from .runtime.rules.operands import check_head_dims, check_heads
from .runtime.rules.score import window

__all__ = ["AttentionBounds"]


@dataclass(frozen=True, kw_only=True)
class AttentionBounds:
    """Upper bounds of the calls of one model, for `workspace_size` and `warmup`.

    Attributes
    ----------
    batch_size, max_seqlen_q, max_seqlen_k : int
    num_heads_q, num_heads_kv, headdim : int
    total_q : int, optional
        Query tokens of all requests; ``batch_size * max_seqlen_q`` if None.
    headdim_v : int, optional
        ``headdim`` if None.
    dtype, kv_dtype : str or dtype
        Of q; of k and v, the same if None. fp8 in any usual spelling.
    page_size, max_blocks : int, optional
        Block size of the cache and columns of ``block_table``; None and 0 for packed keys.
    causal, window_size, softcap, num_splits, batch_invariant
        As the calls will pass them.
    alibi, sink, descale : bool
        Whether the calls pass slopes, sinks, descales.
    return_softmax_lse : bool
    q_v : bool
        Whether the calls pass ``q_v`` (multi-head latent attention).
    prefix_levels : int
        Levels of the prefixes that calls of `cascade_attention` share; 0 = there are none.

    Raises
    ------
    TypeError, ValueError
        Bounds that no call could have.
    """

    batch_size: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    total_q: int | None = None
    headdim_v: int | None = None
    dtype: Any = "bfloat16"
    kv_dtype: Any = None
    page_size: int | None = None
    max_blocks: int = 0
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    num_splits: int = 0
    batch_invariant: bool = False
    alibi: bool = False
    sink: bool = False
    descale: bool = False
    return_softmax_lse: bool = False
    q_v: bool = False
    prefix_levels: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_blocks", "num_splits", "prefix_levels"):
            non_negative(name, getattr(self, name))
        for name in ("max_seqlen_q", "max_seqlen_k"):
            token_bound(name, getattr(self, name))
        check_heads(self.num_heads_q, self.num_heads_kv, self.num_heads_kv, [], [])
        check_head_dims(self.headdim, self.headdim, self._head_dim_v, self.q_v)
        window(self.window_size, self.causal)
        if self.page_size is not None and non_negative("page_size", self.page_size) < 1:
            raise ValueError("page_size=0 must be at least 1, or None for packed keys")

    @property
    def _head_dim_v(self) -> int:
        return self.headdim if self.headdim_v is None else self.headdim_v

    def problem(self) -> AttentionProblem:
        """The largest problem within the bounds."""
        q_type = parse_scalar_type(self.dtype)
        kv_type = q_type if self.kv_dtype is None else parse_scalar_type(self.kv_dtype, "kv_dtype")
        left, right = window(self.window_size, self.causal)
        tokens = self.batch_size * self.max_seqlen_q if self.total_q is None else self.total_q
        return AttentionProblem(
            batch=self.batch_size,
            total_q=tokens,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.headdim,
            head_dim_v=self._head_dim_v,
            q_type=q_type,
            kv_type=kv_type,
            out_type=BF16 if q_type.is_fp8 else q_type,
            page_size=self.page_size,
            max_blocks=self.max_blocks,
            window_left=left,
            window_right=right,
            softmax_scale=self.headdim**-0.5,
            softcap=self.softcap,
            has_alibi=self.alibi,
            alibi_per_batch=False,
            has_sink=self.sink,
            has_q_descale=self.descale and q_type.is_fp8,
            has_kv_descale=self.descale and kv_type.is_fp8,
            has_seqused_k=self.page_size is not None,
            has_q_v=self.q_v,
            wants_lse=self.return_softmax_lse,
            num_splits=min(self.num_splits, MOST_TOKENS),
            batch_invariant=self.batch_invariant,
            cp_world_size=1,
            cp_rank=0,
        )
