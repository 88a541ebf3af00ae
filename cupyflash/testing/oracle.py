"""Attention, merge and cache writes in float64, from the maths alone, one sequence at a time.

Nothing here is shared with the library, and nothing is optimised: it is what the library is
judged by. Inputs count as they are stored, so only the computation under test is measured.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["attention_oracle", "decode", "merge_oracle", "to_numpy", "varlen_oracle", "visible"]

Float64 = NDArray[np.float64]

_SCHEDULING = {
    *("max_seqlen_q", "max_seqlen_k", "out", "lse", "num_splits", "fa_version", "workspace"),
    *("stream", "batch_invariant", "deterministic", "scheduler_metadata", "return_softmax_lse"),
}


def to_numpy(array: Any) -> NDArray[Any]:
    """A NumPy view or copy of a host or device array."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def decode(array: Any, fp8_dtype: str = "e4m3") -> Float64:
    """The values of an array as float64; uint8 is read as the fp8 format named."""
    host = to_numpy(array)
    if host.dtype == np.uint8:
        e5m2 = "e5m2" in fp8_dtype
        host = host.view(ml_dtypes.float8_e5m2 if e5m2 else ml_dtypes.float8_e4m3fn)
    return host.astype(np.float64)


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
    distance = np.abs(
        np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k)[None, :]
    )
    slopes = None if alibi_slopes is None else decode(alibi_slopes)
    sinks = None if s_aux is None else decode(s_aux)
    for head in range(heads):
        kv_head = head * kv_heads // heads
        score = q[:, head] @ k[:, kv_head].T * scale
        if softcap > 0:
            score = softcap * np.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * distance
        for row in range(seqlen_q):
            keys = seen[row]
            terms = score[row, keys]
            if sinks is not None:
                terms = np.append(terms, sinks[head])
            if terms.size == 0 or terms.max() == -np.inf:
                continue
            weight = np.exp(terms - terms.max())
            lse[head, row] = terms.max() + np.log(weight.sum())
            weight = weight[: keys.sum()] / weight.sum()
            out[row, head] = weight @ v[keys, kv_head]
    return out, lse


def _rows_of(scale: Any, batch: int, kv_heads: int) -> Float64:
    host = to_numpy(1.0 if scale is None else scale).astype(np.float64)
    return np.broadcast_to(host, (batch, kv_heads))


def varlen_oracle(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int | None = None,
    cu_seqlens_q: Any = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    *,
    block_table: Any = None,
    alibi_slopes: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    fp8_dtype: str = "e4m3",
    q_fp8_dtype: str | None = None,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attention of a ragged batch; takes the arguments of ``flash_attn_varlen_func`` as they are.

    Options that only decide how the work is scheduled are dropped; ``softmax_scale``, ``causal``,
    ``window_size``, ``softcap`` and ``s_aux`` go to `attention_oracle`.

    Returns
    -------
    out : float64 [total_q, num_heads_q, head_dim_v]
    lse : float64 [num_heads_q, total_q]
        Rows of no request (past ``cu_seqlens_q[-1]``) hold NaN in both.
    """
    options = {name: given for name, given in options.items() if name not in _SCHEDULING}
    starts_q = to_numpy(cu_seqlens_q).astype(int)
    batch, kv_heads = len(starts_q) - 1, to_numpy(k).shape[-2]
    scale_q, scale_k, scale_v = (
        _rows_of(s, batch, kv_heads) for s in (q_descale, k_descale, v_descale)
    )
    q = decode(q, q_fp8_dtype or fp8_dtype)
    out = np.full((*q.shape[:2], to_numpy(v).shape[-1]), np.nan)
    lse = np.full((q.shape[1], q.shape[0]), np.nan)
    group = q.shape[1] // kv_heads
    for request in range(batch):
        rows = slice(starts_q[request], starts_q[request + 1])
        keys = [
            _sequence(operand, request, cu_seqlens_k, seqused_k, block_table) for operand in (k, v)
        ]
        slopes = None if alibi_slopes is None else decode(alibi_slopes)
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[request]
        out[rows], lse[:, rows] = attention_oracle(
            q[rows] * np.repeat(scale_q[request], group)[:, None],
            decode(keys[0], fp8_dtype) * scale_k[request][:, None],
            decode(keys[1], fp8_dtype) * scale_v[request][:, None],
            alibi_slopes=slopes,
            **{"softmax_scale": q.shape[2] ** -0.5, **_given(options)},
        )
    return out, lse


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _sequence(
    operand: Any, request: int, cu_seqlens_k: Any, seqused_k: Any, block_table: Any
) -> NDArray[Any]:
    """The keys or values of one request, token by token from its pages."""
    host = to_numpy(operand)
    used = None if seqused_k is None else int(to_numpy(seqused_k)[request])
    if block_table is None:
        starts = to_numpy(cu_seqlens_k).astype(int)
        length = starts[request + 1] - starts[request] if used is None else used
        return host[starts[request] : starts[request] + length]
    assert used is not None
    table, page = to_numpy(block_table)[request], host.shape[1]
    tokens = [host[table[token // page], token % page] for token in range(used)]
    return np.stack(tokens) if tokens else host[0, :0]


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
