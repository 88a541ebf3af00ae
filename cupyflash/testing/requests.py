"""The requests of a ragged batch, taken apart one by one from the arguments of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["Float64", "Request", "decode", "requests", "to_numpy", "unowned"]

Float64 = NDArray[np.float64]

_SCHEDULING = {
    *("out", "lse", "num_splits", "fa_version", "workspace", "stream", "batch_invariant"),
    *("deterministic", "scheduler_metadata", "return_softmax_lse"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its values in float64, descales applied, and the options of its attention.

    Attributes
    ----------
    rows : slice
        Its rows of q and out.
    q : float64 [seqlen_q, num_heads_q, head_dim]
    k, v : float64 [seqlen_k, num_heads_kv, head_dim(_v)]
    options : dict
        Keyword arguments of ``attention_oracle``.
    descales : (float64 [num_heads_kv], float64 [num_heads_kv])
        That q and k were multiplied by.
    """

    rows: slice
    q: Float64
    k: Float64
    v: Float64
    options: dict[str, Any]
    descales: tuple[Float64, Float64]


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


def unowned(q: Any, k: Any, v: Any) -> tuple[Float64, Float64]:
    """An out and an lse in which no row belongs to a request yet: all NaN."""
    total_q, heads = to_numpy(q).shape[:2]
    out = np.full((total_q, heads, to_numpy(v).shape[-1]), np.nan)
    return out, np.full((heads, total_q), np.nan)


def requests(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int | None = None,
    cu_seqlens_q: Any = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    *,
    block_table: Any = None,
    alibi_slopes: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    fp8_dtype: str = "e4m3",
    q_fp8_dtype: str | None = None,
    **options: Any,
) -> Iterator[Request]:
    """Every request of a call of ``flash_attn_varlen_func`` with these arguments, in order.

    With ``q_v`` its keys are longer: q·k + q_v·v is the product of (q, q_v) and (k, v).
    """
    options = {name: given for name, given in options.items() if name not in _SCHEDULING}
    starts = to_numpy(cu_seqlens_q).astype(int)
    batch, kv_heads = len(starts) - 1, to_numpy(k).shape[-2]
    queries = decode(q, q_fp8_dtype or fp8_dtype)
    if q_v is not None:
        queries = np.concatenate([queries, decode(q_v)], axis=-1)
    group = queries.shape[1] // kv_heads
    scale_q, scale_k, scale_v = (
        np.broadcast_to(to_numpy(1.0 if s is None else s).astype(np.float64), (batch, kv_heads))
        for s in (q_descale, k_descale, v_descale)
    )
    slopes = None if alibi_slopes is None else decode(alibi_slopes)
    for i in range(batch):
        rows = slice(starts[i], starts[i + 1])
        keys, values = (
            decode(_sequence(operand, i, cu_seqlens_k, seqused_k, block_table), fp8_dtype)
            for operand in (k, v)
        )
        if q_v is not None:
            keys = np.concatenate([keys, values], axis=-1)
        yield Request(
            rows,
            queries[rows] * np.repeat(scale_q[i], group)[:, None],
            keys * scale_k[i][:, None],
            values * scale_v[i][:, None],
            {
                **options,
                "alibi_slopes": slopes[i] if slopes is not None and slopes.ndim == 2 else slopes,
            },
            (scale_q[i], scale_k[i]),
        )


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
    if used is None:
        raise TypeError("block_table needs seqused_k")
    table, page = to_numpy(block_table)[request], host.shape[1]
    tokens = np.zeros((used, *host.shape[2:]), host.dtype)
    at = np.arange(used)
    block = table[at // page]
    there = (block >= 0) & (block < host.shape[0])  # a page that no query sees may be gone
    tokens[there] = host[block[there], at[there] % page]
    return tokens
