"""Attention of batches of one length: arrays [batch, S, H, D]."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import flash_attn_varlen_func
from .runtime.arrays import array_module, as_array, merge_leading, on_stream
from .runtime.placement import check_apart

__all__ = [
    "as_batch",
    "batch_results",
    "check_batch_lse",
    "flash_attn_func",
    "ragged_arguments",
]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    out: Any = None,
    lse: Any = None,
    return_softmax_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of a batch of equal lengths.

    Parameters
    ----------
    q : array [batch, Sq, Hq, D]
    k, v : array [batch, Sk, Hk, D], [batch, Sk, Hk, Dv]
    out : array [batch, Sq, Hq, Dv], optional
        Where to write. New if None.
    lse : array [batch, Hq, Sq], float32, optional
        Where to write the log-sum-exp.
    return_softmax_lse : bool
    **options
        As `flash_attn_varlen_func` takes them, except lengths and `block_table`.

    Returns
    -------
    out : array [batch, Sq, Hq, Dv]
    lse : array [batch, Hq, Sq], float32
        Only with `return_softmax_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_varlen_func`.
    """
    stream = options.get("stream")
    q, k, v = (as_batch(n, a, stream) for n, a in (("q", q), ("k", k), ("v", v)))
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k, v hold {q.shape[0]}, {k.shape[0]}, {v.shape[0]} sequences")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens a sequence and v {v.shape[1]}")
    check_batch_lse(lse, (q.shape[0], q.shape[2], q.shape[1]), out)
    with on_stream(q, stream, "lengths of a batch"):
        starts = _starts(array_module(k), k.shape[0], k.shape[1])
        arguments = ragged_arguments(
            q, merge_leading(k, "k", copy=True), merge_leading(v, "v", copy=True), k.shape[1], out,
            cu_seqlens_k=starts,
            return_softmax_lse=return_softmax_lse or lse is not None, **options,
        )  # fmt: skip
        found = flash_attn_varlen_func(**arguments)
        return batch_results(found, q.shape, out, lse, return_softmax_lse)


def as_batch(name: str, array: Any, stream: Any = None) -> Any:
    """The argument as an array of four dimensions."""
    array = as_array(array, name, stream)
    if array.ndim != 4:
        raise ValueError(f"{name} has shape {array.shape}; it must be [batch, S, H, D]")
    return array


def _starts(module: Any, batch: int, length: int) -> Any:
    return module.arange(batch + 1, dtype=np.int32) * np.int32(length)


def check_batch_lse(lse: Any, shape: tuple[int, int, int], out: Any) -> None:
    """An ``lse`` of the caller's is float32 [batch, Hq, Sq], in other memory than ``out``."""
    if lse is None:
        return
    given = as_array(lse, "lse")
    if given.shape != shape or given.dtype != np.float32:
        raise ValueError(f"lse is {given.dtype} {given.shape}; it must be float32 {list(shape)}")
    if out is not None:
        check_apart(("lse", "out"), given, as_array(out, "out"))


def ragged_arguments(
    q: Any, k: Any, v: Any, max_seqlen_k: int, out: Any, **options: Any
) -> dict[str, Any]:
    """Arguments of the ragged call behind a batch."""
    batch, len_q = q.shape[:2]
    return {
        "q": merge_leading(q, "q", copy=True),
        "k": k,
        "v": v,
        "max_seqlen_q": len_q,
        "cu_seqlens_q": _starts(array_module(q), batch, len_q),
        "max_seqlen_k": max_seqlen_k,
        "out": None
        if out is None
        else merge_leading(as_batch("out", out, options.get("stream")), "out"),
        **options,
    }


def batch_results(
    found: Any, shape: tuple[int, ...], out: Any, lse: Any, return_softmax_lse: bool
) -> Any:
    """The results of the ragged call in the shapes of the batch."""
    batch, len_q, heads, _ = shape
    flat_out, flat_lse = found if isinstance(found, tuple) else (found, None)
    result = flat_out.reshape(batch, len_q, heads, flat_out.shape[-1]) if out is None else out
    if flat_lse is None:
        return result
    by_batch = flat_lse.reshape(heads, batch, len_q).transpose(1, 0, 2)
    if lse is not None:
        as_array(lse, "lse")[...] = by_batch
        by_batch = lse
    return (result, by_batch) if return_softmax_lse else result
