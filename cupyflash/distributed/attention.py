"""Attention of new tokens over themselves and over a context that lies on many ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.merge import merge_attn_states
from cupyflash.runtime.arrays import array_module

from .combine import combine_method, combined, exchange_states
from .communicator import Communicator
from .heads import gather_heads
from .states import States

__all__ = ["context_parallel_attention"]

Array = Any  # NumPy or CuPy


def context_parallel_attention(
    group: Communicator,
    q: Array,
    k: Array,
    v: Array,
    key_cache: Array,
    value_cache: Array,
    *,
    cu_seqlens_q: Array,
    max_seqlen_q: int,
    context_lens: Array,
    max_context_len: int,
    block_table: Array,
    q_v: Array = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    s_aux: Array = None,
    k_descale: Any = None,
    v_descale: Any = None,
    fp8_dtype: str = "e4m3",
    out: Array = None,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    combine: str = "auto",
    heads: str = "groups",
    all_q: Array = None,
    all_q_v: Array = None,
) -> tuple[Array, Array]:
    """Each request's new tokens over its context, dealt over ranks, and over themselves.

    Every rank has the same requests and KV heads and query heads of its own. It attends to its
    share of the context with the heads of all ranks, the states are merged where they were asked,
    and the state of the new tokens over themselves joins. A sink belongs to that last one, so it
    counts once. A step of new prompts, with no context on any rank, moves nothing.

    Parameters
    ----------
    group : Communicator
    q : array [total_q, Hq, D], float16, bfloat16, or float32 (NumPy only)
        Of this rank's heads. Rows past ``cu_seqlens_q[-1]`` are padding.
    k, v : array [total_q, Hk, D(v)]
        Of the new tokens, in the type of q; all of them, on every rank.
    key_cache, value_cache : array [num_blocks, block_size, Hk, D(v)]
        This rank's share of the contexts; see `Sharding`.
    cu_seqlens_q : array [batch + 1], int32
    max_seqlen_q : int
    context_lens : array [batch], int32
        Tokens of each context on this rank.
    max_context_len : int
        Their bound on any rank, the same on all; 0 = no request has a context.
    block_table : array [batch, max_blocks], int32
    q_v : array [total_q, Hq, Dv], optional
        The latent part of the queries (multi-head latent attention): v is the latent part of the
        keys too.
    softmax_scale, causal, softcap, s_aux, k_descale, v_descale, fp8_dtype
        As `flash_attn_varlen_func`; sinks of this rank's heads; descales of the cache.
    out : array [total_q, Hq, Dv], optional
        Where to write; padding rows are left as they are.
    scheduler_metadata : SchedulerMetadata, optional
        Of the pass over the context, with ``size * Hq`` query heads and no mask.
    num_splits : int
        Of the same pass.
    batch_invariant : bool
    combine : {"auto", "a2a", "ag", "ag_rs"}
        See `combine_states`.
    heads : {"groups", "blocks"}
        Which query heads a rank has: an equal part of every KV head's group, or all heads of
        ``Hk / size`` KV heads, rank after rank, as column-parallel projections deal them. Blocks
        need no sorting of heads in a step of one token; k and v have all KV heads either way.
    all_q, all_q_v : array [total_q, size * Hq, D or Dv], optional
        q and q_v of all ranks, in the order of `gather_heads`, where every rank computes them:
        they are not gathered then.

    Returns
    -------
    out : array [total_q, Hq, Dv]
    lse : array [Hq, total_q], float32
        0 in padding rows.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_varlen_func`, ``combine``, or ``heads``.
    """
    xp, (tokens, num_heads, _) = array_module(q), q.shape
    shared: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap, "batch_invariant": batch_invariant,
    }  # fmt: skip
    if out is None:
        out = xp.empty((*q.shape[:2], v.shape[-1]), q.dtype)
    lse = xp.empty((num_heads, tokens), np.float32)
    ranks, kv_heads = group.size, key_cache.shape[2]
    if heads == "blocks":
        k, v, kv_heads = *_own_kv_heads(group, k, v), 1
    elif heads != "groups":
        raise ValueError(f"heads={heads!r}; use 'groups' or 'blocks'")
    context = States.empty(q, (tokens, ranks * num_heads, out.shape[-1]), out.dtype)
    method = combine_method(combine, ranks, context.buffer.nbytes)
    _check_known("all_q", all_q, "q", q, ranks)
    _check_known("all_q_v", all_q_v, "q_v", q_v, ranks)

    def fill() -> None:
        # Padding rows: a finite LSE here and none there let them pass through the merge.
        context.lse.fill(-np.inf)
        lse.fill(0)

    def new_tokens() -> None:
        flash_attn_varlen_func(
            q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_q, cu_seqlens_q, q_v=q_v,
            causal=causal, s_aux=s_aux, out=out, lse=lse,
            num_splits=1 if batch_invariant else 0, **shared,
        )  # fmt: skip

    if max_context_len == 0:
        fill()
        new_tokens()
        return out, lse
    # Both beside the queries' way; the context's pass needs only the first.
    filled, joined = group.beside(fill), group.beside(new_tokens)
    asked = _asked(group, q, all_q, kv_heads)
    asked_v = None if q_v is None else _asked(group, q_v, all_q_v, kv_heads)
    filled()
    flash_attn_varlen_func(
        asked, key_cache, value_cache, max_seqlen_q, cu_seqlens_q, max_context_len,
        seqused_k=context_lens, q_v=asked_v, block_table=block_table, out=context.out,
        lse=context.lse, k_descale=k_descale, v_descale=v_descale, fp8_dtype=fp8_dtype,
        scheduler_metadata=scheduler_metadata, num_splits=num_splits, **shared,
    )  # fmt: skip
    if ranks == 2 and method != "ag_rs":
        _merge_pair(group, context, kv_heads, method, out, lse)
        return out, lse
    own, own_lse = (
        combined(group, context, kv_heads, method) if ranks > 1 else (context.out, context.lse)
    )
    joined()
    merge_attn_states(out, own, own_lse, out, lse, lse)
    return out, lse


def _merge_pair(
    group: Communicator, context: States, kv_heads: int, method: str, out: Array, lse: Array
) -> None:
    """Of two ranks: this one's part joins the new tokens while the other's is on its way."""
    rank = group.rank
    # Queued behind the new tokens' pass, so this joins that too.
    joined = group.beside(
        lambda: merge_attn_states(out, *context.asked_by(rank, 2, kv_heads), out, lse, lse)
    )
    outs, lses = exchange_states(group, context, kv_heads, method)
    joined()
    merge_attn_states(out, outs[1 - rank], lses[1 - rank], out, lse, lse)


def _asked(group: Communicator, own: Array, known: Array, kv_heads: int) -> Array:
    """Queries of all ranks: gathered, unless they are known."""
    if known is not None:
        return known
    return own if group.size == 1 else gather_heads(group.all_gather(own), kv_heads)


def _check_known(name: str, known: Array, own_name: str, own: Array, ranks: int) -> None:
    if known is None:
        return
    if own is None:
        raise ValueError(f"{name} is given without {own_name}, this rank's part of it")
    right = own.shape[0], ranks * own.shape[1], own.shape[2]
    if known.shape != right or known.dtype != own.dtype:
        raise ValueError(
            f"{name} is {known.dtype} of shape {known.shape}; {own_name} of {ranks} ranks is "
            f"{own.dtype} of shape {right}"
        )


def _own_kv_heads(group: Communicator, k: Array, v: Array) -> tuple[Array, Array]:
    """Of the new tokens what this rank's block of query heads sees."""
    each, rest = divmod(k.shape[1], group.size)
    if rest:
        raise ValueError(
            f"heads='blocks': {k.shape[1]} KV heads over {group.size} ranks; a rank must have all "
            "query heads of as many KV heads as the others, or use heads='groups'"
        )
    own = slice(group.rank * each, (group.rank + 1) * each)
    return k[:, own], v[:, own]
