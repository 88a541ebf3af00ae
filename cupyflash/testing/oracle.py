"""Attention, merge and cache writes in float64, from the maths alone, one sequence at a time.

Nothing here is shared with the library, and nothing is optimised: it is what the library is
judged by. Inputs count as they are stored, so only the computation under test is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .requests import Float64, Request, decode, requests, to_numpy, unowned
from .rounding import DTYPES, saturate

__all__ = ["attention_oracle", "merge_oracle", "varlen_oracle", "visible", "write_oracle"]


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int] | None
) -> NDArray[np.bool_]:
    """Which key each query sees: bool [seqlen_q, seqlen_k], aligned at the bottom right."""
    left, right = window_size if window_size is not None else (-1, -1)
    query = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = np.arange(seqlen_k)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    if causal:
        seen &= key <= query
    return seen


def attention_oracle(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    s_aux: Any = None,
) -> tuple[Float64, Float64]:
    """Attention of one sequence.

    Parameters
    ----------
    q : array [seqlen_q, num_heads_q, head_dim]
    k, v : array [seqlen_k, num_heads_kv, head_dim(_v)]
    softmax_scale : float, optional
        Default ``head_dim ** -0.5``.
    causal, window_size, softcap
        As in ``flash_attn_varlen_func``.
    alibi_slopes, s_aux : array [num_heads_q], optional

    Returns
    -------
    out : float64 [seqlen_q, num_heads_q, head_dim_v]
        0 in rows that see no key.
    lse : float64 [num_heads_q, seqlen_q]
        Natural logarithm, the sink included; -inf (or the sink) in rows that see no key.
    """
    q, k, v = decode(q), decode(k), decode(v)
    (seqlen_q, heads, head_dim), (seqlen_k, kv_heads) = q.shape, k.shape[:2]
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    out = np.zeros((seqlen_q, heads, v.shape[2]))
    lse = np.full((heads, seqlen_q), -np.inf)
    seen = visible(seqlen_q, seqlen_k, causal, window_size)
    v = np.where(seen.any(axis=0).reshape(-1, 1, 1), v, 0)  # what no query sees may hold anything
    distance = np.abs(
        np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k)[None, :]
    )
    slopes = None if alibi_slopes is None else decode(alibi_slopes)
    sinks = None if s_aux is None else decode(s_aux)
    for head in range(heads):
        kv_head = head * kv_heads // heads
        score: Float64 = q[:, head] @ k[:, kv_head].T * scale
        if softcap > 0:
            score = softcap * np.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * distance
        score = np.where(seen, score, -np.inf)
        if sinks is not None:
            score = np.append(score, np.full((seqlen_q, 1), sinks[head]), axis=1)
        top: Float64 = np.max(score, axis=1, initial=-np.inf)
        some = np.flatnonzero(top != -np.inf)
        top = top[some, None]
        weight = np.exp(score[some] - top)
        total = weight.sum(axis=1)
        lse[head, some] = top[:, 0] + np.log(total)
        out[some, head] = weight[:, :seqlen_k] @ v[:, kv_head] / total[:, None]
    return out, lse


def varlen_oracle(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> tuple[Float64, Float64]:
    """Attention of a ragged batch; takes the arguments of ``flash_attn_varlen_func`` as they are.

    Options that only decide how the work is scheduled are dropped.

    Returns
    -------
    out : float64 [total_q, num_heads_q, head_dim_v]
    lse : float64 [num_heads_q, total_q]
        Rows of no request (past ``cu_seqlens_q[-1]``) hold NaN in both.
    """
    return oracle_of(requests(q, k, v, *args, **kwargs), *unowned(q, k, v))


def oracle_of(each: Iterable[Request], out: Float64, lse: Float64) -> tuple[Float64, Float64]:
    """``out`` and ``lse`` with the rows of each request."""
    for request in each:
        out[request.rows], lse[:, request.rows] = attention_oracle(
            request.q, request.k, request.v, **request.options
        )
    return out, lse


def merge_oracle(*states: tuple[Any, Any], s_aux: Any = None) -> tuple[Float64, Float64]:
    """The state over the union of the states' key sets.

    Parameters
    ----------
    *states : (out [tokens, heads, head_dim], lse [heads, tokens])
        An lse of either infinity is an empty state, whatever its out holds.
    s_aux : array [heads], optional
        Sink logits, merged once.

    Returns
    -------
    out : float64 [tokens, heads, head_dim]
    lse : float64 [heads, tokens]
        0 and -inf where every state is empty.
    """
    outs, lses = [decode(out) for out, _ in states], [decode(lse) for _, lse in states]
    if s_aux is not None:
        outs.append(np.zeros_like(outs[0]))
        lses.append(np.broadcast_to(decode(s_aux)[:, None], lses[0].shape))
    merged, total = np.zeros_like(outs[0]), np.full(lses[0].shape, -np.inf)
    for token, head in np.ndindex(merged.shape[:2]):
        filled = [i for i, lse in enumerate(lses) if not np.isinf(lse[head, token])]
        if not filled:
            continue
        top = max(lses[i][head, token] for i in filled)
        weights = [np.exp(lses[i][head, token] - top) for i in filled]
        total[head, token] = top + np.log(sum(weights))
        merged[token, head] = sum(
            weight * outs[i][token, head] for weight, i in zip(weights, filled, strict=True)
        ) / sum(weights)
    return merged, total


def write_oracle(
    key: Any, cache: Any, slot_mapping: Any, scale: Any = 1.0, *, fp8_dtype: str = "e4m3"
) -> NDArray[Any]:
    """What a cache holds after a write, in its own type; token by token.

    Parameters
    ----------
    key : array [tokens or more, num_heads, head_dim]
    cache : array [num_blocks, block_size, num_heads, head_dim]
        Its content before the write; uint8 is the fp8 format named. Left as it is.
    slot_mapping : array [tokens]
        Negative slots are skipped.
    scale : scalar or array [1] or [num_heads]
        fp8 only. Values are divided by it (in float32, as the contract says), rounded to nearest
        even and saturated; NaN becomes 0x7F.

    Returns
    -------
    ndarray [num_blocks, block_size, num_heads, head_dim]
    """
    written = np.array(to_numpy(cache))
    page, heads = written.shape[1], written.shape[2]
    kind = written.dtype
    if kind == np.uint8:
        kind = DTYPES["e5m2" if "e5m2" in fp8_dtype else "e4m3"]
    scales = np.broadcast_to(to_numpy(scale).astype(np.float32).reshape(-1), (heads,))[:, None]
    for token, slot in enumerate(to_numpy(slot_mapping).tolist()):
        if slot < 0:
            continue
        row = to_numpy(key)[token]
        if kind.itemsize == 1:
            with np.errstate(all="ignore"):
                row = saturate(row.astype(np.float32) / scales, kind).view(written.dtype)
        written[slot // page, slot % page] = row.astype(written.dtype)
    return written
