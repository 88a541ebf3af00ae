"""Attention over packed or paged keys, for ragged batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cpu
from .fa_version import need_of, resolve_version
from .runtime.arrays import array_module, as_array, merge_leading, on_host
from .runtime.device import active_device
from .runtime.problem import AttentionProblem, describe
from .runtime.rules import python_scalar, spec_of
from .scheduler_metadata import SchedulerMetadata, check_metadata

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    scheduler_metadata: SchedulerMetadata | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    fp8_dtype: str = "e4m3",
    q_fp8_dtype: str | None = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    s_aux: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    workspace: Any = None,
    batch_invariant: bool = False,
    stream: Any = None,
) -> Any:
    """Attention of a ragged batch: each request's queries over its own keys.

    NumPy arrays are computed on the CPU, arrays on a GPU by kernels. Scores are scaled, capped,
    biased (ALiBi), masked and then normalised, in this order. A row that sees no key gives 0, and
    -inf as its log-sum-exp.

    Parameters
    ----------
    q : array [total_q, Hq, D], float16, bfloat16, fp8, or float32 (NumPy only)
        Queries of all requests, one request after the other. fp8 as uint8 or an ml_dtypes type.
    k, v : array [total_k, Hk, D], [total_k, Hk, Dv]
        Packed like q; or, with `block_table`, blocks of a cache
        [num_blocks, block_size, Hk, D(v)]. Hq is a multiple of Hk. Strides may be anything, the
        last dimension contiguous. The dtype of q, or fp8 under any q.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths of one request, tokens.
    cu_seqlens_q : array [batch + 1], int32
        Where each request's rows start in q; the last entry is where they end. Rows of q past it
        are ignored, rows of `out` past it are left as they are.
    cu_seqlens_k : array [batch + 1], int32, optional
        The same for packed k and v; required for them.
    seqused_k : array [batch], int32, optional
        Keys of each request; required with `block_table`. With packed keys, how many of a
        request's rows count.
    q_v : array, optional
        The latent part of a query (multi-head latent attention); not available yet.
    dropout_p : float
        Must be 0.
    softmax_scale : float, optional
        Multiplies q·k; ``D ** -0.5`` if None. A number known on the host.
    causal : bool
        Query i of Sq sees key j of Sk if ``j <= i + Sk - Sq`` (aligned at the bottom right).
    window_size : (int, int), optional
        Keys to the left and right of a query's position that it sees, inclusive; -1 = all.
    softcap : float
        ``softcap * tanh(score / softcap)`` where positive.
    alibi_slopes : array [Hq] or [batch, Hq], float32, optional
        Bias ``-slope * |i + Sk - Sq - j|``.
    deterministic : bool
        Always so: equal inputs give equal bits.
    return_attn_probs : bool
        Must be False.
    block_table : array [batch, max_blocks], int32, optional
        Blocks of each request in order; entries past the used ones may hold anything.
    return_softmax_lse : bool
        Return `lse` too.
    out : array [total_q, Hq, Dv], optional
        Where to write; q's dtype, or bfloat16 or float16 for an 8-bit q. New if None.
    lse : array [Hq, total_q], float32, optional
        Where to write the natural log-sum-exp of the scores, the sink included.
    scheduler_metadata : SchedulerMetadata, optional
        From `get_scheduler_metadata` for the same bounds.
    q_descale, k_descale, v_descale : array [batch, Hk] or [1], float32, or number, optional
        Multiplies the stored fp8 values; any strides. 1 if None. Refused on 16-bit operands.
    fp8_dtype : str
        What uint8 arrays hold: ``"e4m3"`` or ``"e5m2"`` in any usual spelling.
    q_fp8_dtype : str, optional
        The same for q, if it differs.
    num_splits : int
        0 = as planned, 1 = keys of a request are not split, n = at most n pieces.
    fa_version : int, optional
        2 = portable kernels, 3 = Hopper kernels; the best that can serve the call if None.
    s_aux : array [Hq], float32, float16 or bfloat16, optional
        Sink: one more logit of each head without a value; neither scaled nor capped.
    cp_world_size, cp_rank, cp_tot_seqused_k
        Context parallelism; not available yet.
    workspace : array [nbytes], uint8, optional
        Scratch on the GPU of at least `workspace_size` bytes. The CPU needs none.
    batch_invariant : bool
        The bits of a request do not depend on its neighbours. Always so on the CPU.
    stream : int or stream, optional
        The current stream of the arrays' device if None. The CPU has none.

    Returns
    -------
    out : array [total_q, Hq, Dv]
    lse : array [Hq, total_q], float32
        Only with `return_softmax_lse`.

    Raises
    ------
    TypeError
        A dtype, or arrays on the CPU and on a GPU in one call.
    ValueError
        A shape, length, option, or a version that cannot run here; says what would work.
    NotImplementedError
        Something that this release does not have.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.zeros((1, 1, 8), np.float32)
    >>> k = v = np.ones((3, 1, 8), np.float32)
    >>> starts = lambda n: np.array([0, n], np.int32)
    >>> flash_attn_varlen_func(q, k, v, 1, starts(1), 3, starts(3))[0, 0, 0]
    np.float32(1.0)
    """
    _refuse(dropout_p, return_attn_probs, q_v, cp_world_size, cp_rank, cp_tot_seqused_k)
    arrays = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k, "block_table": block_table, "s_aux": s_aux,
        "alibi_slopes": alibi_slopes, "out": out, "lse": lse,
    }  # fmt: skip
    for name, array in arrays.items():
        if array is not None:
            arrays[name] = as_array(array, name)
        elif name in ("q", "k", "v"):
            raise TypeError(f"{name} is None; it must be an array")
    descales = [_descale(n, d) for n, d in (("q", q_descale), ("k", k_descale), ("v", v_descale))]
    scales = {n: d if hasattr(d, "shape") else None for n, d in zip("qkv", descales, strict=True)}
    host = on_host(**arrays, **{f"{n}_descale": d for n, d in scales.items()})
    specs = {n: None if a is None else spec_of(a) for n, a in arrays.items()}
    problem = describe(
        **specs,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        descales=tuple(spec_of(d) if hasattr(d, "shape") else d for d in descales),
        softmax_scale=None
        if softmax_scale is None
        else python_scalar("softmax_scale", softmax_scale),
        causal=bool(causal),
        window_size=None if window_size is None else tuple(window_size),
        softcap=python_scalar("softcap", softcap),
        fp8_dtype=fp8_dtype,
        q_fp8_dtype=q_fp8_dtype,
        return_softmax_lse=bool(return_softmax_lse),
        num_splits=num_splits,
        batch_invariant=bool(batch_invariant),
        on_host=host,
    )
    if scheduler_metadata is not None:
        check_metadata(scheduler_metadata, problem)
    if not host:
        resolve_version(need_of(problem), _capability(arrays["q"]), fa_version)
    elif fa_version is not None:
        raise ValueError(f"fa_version={fa_version} names GPU kernels, but the arrays are NumPy's")
    return _on_cpu(problem, arrays, descales, bool(return_softmax_lse))


def _refuse(
    dropout_p: float,
    return_attn_probs: bool,
    q_v: Any,
    cp_world_size: int,
    cp_rank: int,
    cp_tot_seqused_k: Any,
) -> None:
    """Options that are refused whatever the arrays."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p={dropout_p}: inference has no dropout; use 0")
    if return_attn_probs:
        raise ValueError("return_attn_probs=True: weights are never stored; use return_softmax_lse")
    if q_v is not None:
        raise NotImplementedError("q_v: multi-head latent attention is not available yet")
    if (cp_world_size, cp_rank) != (1, 0) or cp_tot_seqused_k is not None:
        raise NotImplementedError(
            f"cp_world_size={cp_world_size}, cp_rank={cp_rank}: context parallelism is not "
            "available yet; use 1 and 0 without cp_tot_seqused_k"
        )


def _descale(operand: str, value: Any) -> Any:
    """A descale as an array, or a float for one number."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return float(value)
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return as_array(value, f"{operand}_descale")
    return python_scalar(f"{operand}_descale", value)


def _capability(array: Any) -> tuple[int, int]:
    device = active_device()
    if device is not None:
        return device.info.capability
    text = array.device.compute_capability
    return int(text[:-1]), int(text[-1])


def _on_cpu(
    problem: AttentionProblem, arrays: dict[str, Any], descales: list[Any], return_lse: bool
) -> Any:
    out, lse = arrays["out"], arrays["lse"]
    if out is None:
        shape = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        out = np.empty(shape, problem.out_type.numpy)
    if lse is None and problem.wants_lse:
        lse = np.empty((problem.num_heads_q, problem.total_q), np.float32)
    cpu.attention(
        problem,
        arrays["q"],
        arrays["k"],
        arrays["v"],
        cu_seqlens_q=arrays["cu_seqlens_q"],
        cu_seqlens_k=arrays["cu_seqlens_k"],
        seqused_k=arrays["seqused_k"],
        block_table=arrays["block_table"],
        q_descale=descales[0],
        k_descale=descales[1],
        v_descale=descales[2],
        s_aux=arrays["s_aux"],
        alibi_slopes=arrays["alibi_slopes"],
        out=out,
        lse=lse,
    )
    return (out, lse) if return_lse else out


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
    lse : array [batch, Hq, Sq], float32, optional
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
    q, k, v = (as_array(a, n) for a, n in ((q, "q"), (k, "k"), (v, "v")))
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}; it must be [batch, S, H, D]")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k, v hold {q.shape[0]}, {k.shape[0]}, {v.shape[0]} sequences")
    (batch, len_q, heads, _), len_k = q.shape, k.shape[1]
    check_batched_lse(lse, (batch, heads, len_q))
    module = array_module(q)
    starts = [module.arange(batch + 1, dtype=np.int32) * np.int32(n) for n in (len_q, len_k)]
    found = flash_attn_varlen_func(
        merge_leading(q, "q", copy=True), merge_leading(k, "k", copy=True),
        merge_leading(v, "v", copy=True), len_q, starts[0], len_k, starts[1],
        out=None if out is None else merge_leading(as_array(out, "out"), "out"),
        return_softmax_lse=return_softmax_lse or lse is not None, **options,
    )  # fmt: skip
    return batched_result(found, (batch, len_q, heads), out, lse, return_softmax_lse)


def check_batched_lse(lse: Any, shape: tuple[int, int, int]) -> None:
    """An ``lse`` of the caller's is float32 [batch, Hq, Sq]."""
    if lse is not None and (lse.shape != shape or lse.dtype != np.float32):
        raise ValueError(f"lse is {lse.dtype} {lse.shape}; it must be float32 {list(shape)}")


def batched_result(
    found: Any, shape: tuple[int, int, int], out: Any, lse: Any, return_softmax_lse: bool
) -> Any:
    """Varlen results in the shapes of a batch of equal lengths."""
    batch, len_q, heads = shape
    flat_out, flat_lse = found if isinstance(found, tuple) else (found, None)
    result = flat_out.reshape(batch, len_q, heads, -1) if out is None else out
    if flat_lse is None:
        return result
    by_batch = flat_lse.reshape(heads, batch, len_q).transpose(1, 0, 2)
    if lse is not None:
        lse[...] = by_batch
        by_batch = lse
    return (result, by_batch) if return_softmax_lse else result
