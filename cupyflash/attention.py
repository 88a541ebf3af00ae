"""Attention over packed or paged keys, for ragged batches."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from . import cpu
from .fa_version import capability_of, known_version, resolve_version
from .families import FAMILIES
from .known_call import keep_known, queue_known
from .runtime import env
from .runtime.arrays import AttentionArrays, as_array
from .runtime.call import Call, prepare, refuse_options
from .runtime.foreign_views import FOREIGN, gpu_views
from .runtime.nvtx import call_range
from .runtime.placement import check_placement
from .runtime.rules.score import sides
from .runtime.rules.share import share_of, with_share
from .scheduler_metadata import check_metadata
from .values import check_bounds, check_values

__all__ = ["describe_call", "flash_attn_varlen_func"]

_GIVEN = (*AttentionArrays._fields, "q_descale", "k_descale", "v_descale", "workspace")


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
    scheduler_metadata: Any = None,
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
    q_v : array [total_q, Hq, Dv], optional
        Multi-head latent attention: scores are ``softmax_scale * (q·k + q_v·v)``. D is at most 64
        and Dv at most 512 then, all operands have 16 bits (NumPy: or are float32), and
        `softmax_scale` is required. See `mla_decode`.
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
    scheduler_metadata : SchedulerMetadata or its buffer, optional
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
    cp_world_size, cp_rank : int
        NumPy arrays only: k and v are one rank's share of each sequence, every
        ``cp_world_size``-th key from key ``cp_rank`` on. Masks, windows and ALiBi count positions
        in the whole sequence; a sink belongs to rank 0. States of all ranks merge to the whole.
    cp_tot_seqused_k : array [batch], int32, optional
        Keys of each whole sequence; required with a share.
    workspace : array [nbytes], uint8, optional
        Scratch on the GPU, at a multiple of 16 bytes; `workspace_size` says how much serves best.
        In a smaller one keys are split less, and it is never written past its end. The device's
        own if None. The CPU needs none.
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
    if dropout_p or return_attn_probs:
        refuse_options(dropout_p, return_attn_probs)
    share = None
    if cp_world_size != 1 or cp_rank or cp_tot_seqused_k is not None:
        share = share_of(cp_world_size, cp_rank, cp_tot_seqused_k)
    given = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, alibi_slopes, s_aux, out,
        lse, q_v, q_descale, k_descale, v_descale, workspace,
    )  # fmt: skip
    options = (
        max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        None if window_size is None else sides(window_size), softcap, fp8_dtype, q_fp8_dtype,
        return_softmax_lse, num_splits, batch_invariant, fa_version,
    )  # fmt: skip
    found = None
    if share is None:
        if type(q) not in FOREIGN:
            found = queue_known(given, options, scheduler_metadata, stream)
        if found is None and (views := gpu_views(given, _GIVEN, stream)):
            given = views
            found = queue_known(given, options, scheduler_metadata, stream)
    if found is None:
        found = _first(given, options, scheduler_metadata, share, stream)
    if out is None:
        out = found[0]
    return (out, found[1] if lse is None else lse) if return_softmax_lse else out


def _first(
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scheduler_metadata: Any,
    share: Any,
    stream: Any,
) -> tuple[Any, Any]:
    """A call whose like is not known: all of it is validated."""
    *arrays, q_descale, k_descale, v_descale, workspace = given
    *asked, fa_version = options
    descales = (q_descale, k_descale, v_descale)
    call = prepare(AttentionArrays(*arrays), descales, *(*asked, stream))
    if scheduler_metadata is not None:
        check_metadata(scheduler_metadata, call)
    if share is not None:
        problem, totals = with_share(call, share)
        return _on_cpu(call._replace(problem=problem), fa_version, stream, totals)
    if call.on_host:
        return _on_cpu(call, fa_version, stream)
    if env.check():
        check_values(call)
    version = resolve_version(call.problem, capability_of(call.arrays.q), fa_version)
    found = _on_gpu(call, version, scheduler_metadata, workspace, stream)
    if not (env.check() or env.debug()):
        keep_known(call, version, given, options, scheduler_metadata)
    return found


def _on_gpu(
    call: Call, version: int, scheduler_metadata: Any, workspace: Any, stream: Any
) -> tuple[Any, Any]:
    if workspace is not None:
        workspace = as_array(workspace, "workspace", stream)
    if env.debug():
        p = call.problem
        name = f"attention v{version}, {p.batch} requests, q {p.total_q}, k {p.max_seqlen_k}"
        with call_range(name):
            return FAMILIES[version].launch(call, scheduler_metadata, workspace, stream)
    return FAMILIES[version].launch(call, scheduler_metadata, workspace, stream)


def _refuse_on_cpu(fa_version: int | None, stream: Any) -> None:
    if fa_version is not None:
        raise ValueError(
            f"fa_version={known_version(fa_version)}: versions are GPU kernels, and these arrays "
            "are NumPy's; use None"
        )
    if stream is not None:
        raise ValueError("stream given, but NumPy arrays are computed before the call returns")


def _on_cpu(call: Call, fa_version: int | None, stream: Any, totals: Any = None) -> tuple[Any, Any]:
    _refuse_on_cpu(fa_version, stream)
    problem, arrays, descales = call.problem, call.arrays, call.descales
    check_bounds(call)
    check_placement(call)
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = np.empty(call.layout.out_shape, problem.out_type.numpy)
    if lse is None and problem.wants_lse:
        lse = np.empty(call.layout.lse_shape, np.float32)
    cpu.attention(
        problem, arrays.q, arrays.k, arrays.v,
        cu_seqlens_q=arrays.cu_seqlens_q, cu_seqlens_k=arrays.cu_seqlens_k,
        seqused_k=arrays.seqused_k, block_table=arrays.block_table, q_v=arrays.q_v,
        q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
        s_aux=arrays.s_aux, alibi_slopes=arrays.alibi_slopes,
        out=out, lse=lse, total_lengths=totals,
    )  # fmt: skip
    return out, lse


_SIGNATURE = inspect.signature(flash_attn_varlen_func)


def describe_call(*args: Any, **kwargs: Any) -> Call:
    """Validate a call of `flash_attn_varlen_func` with these arguments, and do no more.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        What the call itself would raise before it reads an array.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    refuse_options(a["dropout_p"], a["return_attn_probs"])
    share = share_of(a["cp_world_size"], a["cp_rank"], a["cp_tot_seqused_k"])
    call = prepare(
        AttentionArrays(*(a[name] for name in AttentionArrays._fields)),
        (a["q_descale"], a["k_descale"], a["v_descale"]), a["max_seqlen_q"], a["max_seqlen_k"],
        a["softmax_scale"], a["causal"], a["window_size"], a["softcap"], a["fp8_dtype"],
        a["q_fp8_dtype"], a["return_softmax_lse"], a["num_splits"], a["batch_invariant"],
    )  # fmt: skip
    if a["scheduler_metadata"] is not None:
        check_metadata(a["scheduler_metadata"], call)
    if call.on_host:
        _refuse_on_cpu(a["fa_version"], a["stream"])
    return call if share is None else call._replace(problem=with_share(call, share)[0])
