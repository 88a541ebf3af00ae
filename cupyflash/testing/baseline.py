"""The same maths in low precision: the error that any honest kernel may make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .oracle import visible
from .requests import Float64, Request, requests, to_numpy, unowned
from .rounding import round_to
from .tensor_core import eight_bit_products, eight_bit_sums

__all__ = ["attention_baseline", "merge_baseline", "varlen_baseline"]

Float32 = NDArray[np.float32]

PHASES = (0.0, 0.25, 0.5, 0.75)
"""Fractions of a power of two at which 8-bit weights may be scaled; see `attention_baseline`."""

_LARGEST_SUM = 256.0  # of 8-bit weights of _BLOCK keys
_BLOCK = 128
_STEP = 16  # keys that no kernel divides
_MODELLED = 1 << 16  # scores of a head that are added up as tensor cores do it


def attention_baseline(
    q: Any,
    k: Any,
    v: Any,
    *,
    p_dtype: Any,
    out_dtype: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    p_phase: float = 0.0,
    p_shift: int = 0,
    descales: tuple[Float64, Float64] | None = None,
) -> tuple[NDArray[Any], Float32]:
    """Attention of one sequence in float32, with P rounded to ``p_dtype`` before it meets V.

    Parameters are those of ``attention_oracle``; the result is rounded to ``out_dtype``. Of an
    8-bit ``p_dtype`` the range is short: a row's weights are scaled so that no 128 keys in a row
    have a larger sum than 256, and the largest weight is at most 256; then lowered by the part
    ``p_phase`` of a power of two, as which weights are exact depends on it. Scores are then sums of
    8-bit products too, over ``descales`` of q and k, as tensor cores add them up: for some rows,
    the largest scores among them, and for a phase of 0.

    Weights of 16 bits are made over the row's largest score, so that the largest weight is exact,
    for a ``p_shift`` of 0. Kernels keep the largest score of a row's first keys instead, moved by
    whole powers of two at most, and which keys come first is a matter of tiles and splits. So for
    -1 and 1 they are made over the largest score of those 16 keys of the row by which the largest
    weight is rounded down or up the furthest.

    Returns
    -------
    out : out_dtype [seqlen_q, num_heads_q, head_dim_v]
    lse : float32 [num_heads_q, seqlen_q]
        From the sum of the weights before they are rounded, as kernels keep it.
    """
    exact = np.asarray(q, np.float64), np.asarray(k, np.float64)
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    (seqlen_q, heads, head_dim), (seqlen_k, kv_heads) = q.shape, k.shape[:2]
    scale = np.float32(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    out = np.zeros((seqlen_q, heads, v.shape[2]), np.float32)
    lse = np.full((heads, seqlen_q), -np.inf, np.float32)
    seen = visible(seqlen_q, seqlen_k, causal, window_size)
    v = np.where(seen.any(axis=0).reshape(-1, 1, 1), v, np.float32(0))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        score: Float32 = (q[:, head] * scale) @ k[:, kv_head].T
        if descales is not None and p_phase == 0 and score.size:
            by = [float(each[kv_head]) or 1.0 for each in descales]
            stored_q, stored_k = exact[0][:, head] / by[0], exact[1][:, kv_head] / by[1]
            due = by[0] * by[1] * float(scale)
            # Every row's largest score, and some rows as a whole.
            largest = np.argmax(np.where(seen, score, np.float32(-np.inf)), axis=1)
            rows = _exposed_rows(np.where(seen, score, np.float32(0)))
            score[np.arange(seqlen_q), largest] = eight_bit_sums(stored_q, stored_k[largest]) * due
            score[rows] = eight_bit_products(stored_q[rows], stored_k) * due
        if softcap > 0:
            score = np.float32(softcap) * np.tanh(score / np.float32(softcap))
        if alibi_slopes is not None:
            score = score - np.float32(alibi_slopes[head]) * _distance(seqlen_q, seqlen_k)
        score = np.where(seen, score, np.float32(-np.inf))
        sink = np.float32(-np.inf) if s_aux is None else np.float32(s_aux[head])
        top: Float32 = np.max(score, axis=1, initial=sink)
        some = np.flatnonzero(top != -np.inf)
        top = top[some]
        p = np.exp(score[some] - top[:, None])
        total = p.sum(axis=1) + np.exp(sink - top)
        factor = _over_earlier_keys(score[some], top, np.dtype(p_dtype), p_shift)
        rounded = _round_weights(p * factor, np.dtype(p_dtype), p_phase) / factor
        out[some, head] = rounded @ v[:, kv_head] / total[:, None]
        lse[head, some] = top + np.log(total)
    return round_to(out, out_dtype), lse


def _round_weights(p: Float32, dtype: Any, phase: float) -> Float32:
    """Weights of at most 1, a row each."""
    if dtype.itemsize > 1 or not p.shape[1]:
        return round_to(p, dtype).astype(np.float32)
    blocks = np.add.reduceat(p, np.arange(0, p.shape[1], _BLOCK), axis=1)
    largest = np.nan_to_num(blocks.max(axis=1, keepdims=True), nan=1.0)
    down = np.ceil(np.maximum(np.log2(np.maximum(largest, 1.0)), 0.0)) + phase
    scale = (_LARGEST_SUM * 2.0**-down).astype(np.float32)
    rounded: Float32 = round_to(p * scale, dtype).astype(np.float32) / scale
    return rounded


def _over_earlier_keys(score: Float32, top: Float32, dtype: Any, way: int) -> Any:
    """What weights over ``top`` are multiplied by to be over another shift: 1 to 2, [rows, 1]."""
    if not way or not score.shape[1]:
        return np.float32(1)
    shifts = np.maximum.reduceat(score, np.arange(0, score.shape[1], _STEP), axis=1)
    with np.errstate(invalid="ignore"):
        powers = np.where(np.isfinite(shifts), top[:, None] - shifts, 0) / np.log(2)
        factors = np.exp2(powers - np.floor(powers)).astype(np.float32)
        largest = factors * np.exp(shifts.max(axis=1) - top)[:, None]
        error = round_to(largest, dtype).astype(np.float32) / largest - 1
    at = np.argmax(np.nan_to_num(way * error), axis=1)
    return factors[np.arange(len(factors)), at][:, None]


def _exposed_rows(score: Float32) -> NDArray[np.intp]:
    """Rows to model: those that see the largest scores, and evenly spread ones."""
    count = max(8, _MODELLED // score.shape[1])
    if count >= len(score):
        return np.arange(len(score))
    largest = np.nan_to_num(np.abs(score).max(axis=1), nan=0.0, posinf=0.0)
    spread = np.linspace(0, len(score) - 1, count // 2).astype(np.intp)
    return np.union1d(np.argsort(largest)[-(count // 2) :], spread)


def _distance(seqlen_q: int, seqlen_k: int) -> Float32:
    query = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    distance: Float32 = np.abs(query - np.arange(seqlen_k)[None, :]).astype(np.float32)
    return distance


def varlen_baseline(
    q: Any,
    k: Any,
    v: Any,
    *args: Any,
    p_dtype: Any,
    out_dtype: Any,
    p_phase: float = 0.0,
    p_shift: int = 0,
    **kwargs: Any,
) -> tuple[Float64, Float64]:
    """`attention_baseline` for a ragged batch; arguments are those of ``varlen_oracle``.

    Returns
    -------
    out, lse : float64
        Values of ``out_dtype`` and float32, widened; rows of no request hold NaN.
    """
    return baseline_of(
        requests(q, k, v, *args, **kwargs),
        *unowned(q, k, v),
        p_dtype=p_dtype,
        out_dtype=out_dtype,
        p_phase=p_phase,
        p_shift=p_shift,
    )


def baseline_of(
    each: Iterable[Request],
    out: Float64,
    lse: Float64,
    *,
    p_dtype: Any,
    **rounding: Any,
) -> tuple[Float64, Float64]:
    """``out`` and ``lse`` with the rows of each request."""
    for request in each:
        out[request.rows], lse[:, request.rows] = attention_baseline(
            request.q,
            request.k,
            request.v,
            p_dtype=p_dtype,
            descales=request.descales if np.dtype(p_dtype).itemsize == 1 else None,
            **rounding,
            **request.options,
        )
    return out, lse


def merge_baseline(
    *states: tuple[Any, Any], out_dtype: Any, s_aux: Any = None
) -> tuple[NDArray[Any], Float32]:
    """The merge of states in float32, rounded to ``out_dtype``; arguments as ``merge_oracle``."""
    outs = [to_numpy(out).astype(np.float32) for out, _ in states]
    lses = [to_numpy(lse).astype(np.float32) for _, lse in states]
    lses = [np.where(np.isinf(lse), np.float32(-np.inf), lse) for lse in lses]
    if s_aux is not None:
        outs.append(np.zeros_like(outs[0]))
        lses.append(np.broadcast_to(np.asarray(s_aux, np.float32)[:, None], lses[0].shape))
    top = np.max(lses, axis=0)
    shift = np.where(np.isinf(top), np.float32(0), top)
    weights = [np.exp(lse - shift) for lse in lses]
    total = np.sum(weights, axis=0)
    safe = np.where(total == 0, np.float32(1), total)
    merged = np.zeros_like(outs[0])
    for out, weight in zip(outs, weights, strict=True):
        part = (weight / safe).T[..., None]
        merged += np.where(part == 0, np.float32(0), out * part)
    return round_to(merged, out_dtype), np.where(total == 0, -np.inf, shift + np.log(safe))
