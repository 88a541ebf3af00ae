"""The schedule of a step, made once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .runtime import rules
from .runtime.arrays import array_module, as_array, on_host
from .runtime.dtypes import ScalarType, parse_scalar_type
from .runtime.problem import AttentionProblem

__all__ = ["SchedulerMetadata", "check_metadata", "get_scheduler_metadata"]


@dataclass(frozen=True, slots=True)
class ScheduleBounds:
    """What a schedule was made for; a call that differs in any of it is refused."""

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    kv_type: ScalarType
    page_size: int | None
    window_left: int
    window_right: int
    has_softcap: bool
    num_splits: int


@dataclass(frozen=True, slots=True)
class SchedulerMetadata:
    """A schedule and what it is for.

    Attributes
    ----------
    buffer : array, int32
        The schedule itself, on the arrays' side. NumPy arrays need none: it is empty there.
    bounds : ScheduleBounds
    """

    buffer: Any
    bounds: ScheduleBounds


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    page_size: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    fa_version: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> SchedulerMetadata:
    """Make the schedule that every layer of a step shares.

    Parameters
    ----------
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v : int
        Bounds and geometry of the calls that will use it.
    cache_seqlens : array [batch], int32
        Keys of each request.
    qkv_dtype : str or dtype
        Of k and v: ``"bfloat16"``, ``"float16"``, ``"float32"`` or an fp8 spelling.
    cu_seqlens_q : array [batch + 1], int32, optional
        None = one query a request.
    page_size : int, optional
        None = packed keys.
    causal, window_size, num_splits, fa_version
        As the calls will pass them.
    has_softcap : bool
    out : array, int32, optional
        Buffer to write the schedule to (for CUDA graphs).
    stream : int or stream, optional

    Returns
    -------
    SchedulerMetadata

    Raises
    ------
    TypeError, ValueError
        Lengths of another dtype or size, or bounds that no call could have.
    NotImplementedError
        Arrays on a GPU, in a release without attention kernels.
    """
    lengths = as_array(cache_seqlens, "cache_seqlens")
    starts = None if cu_seqlens_q is None else as_array(cu_seqlens_q, "cu_seqlens_q")
    rules.check_lengths("cache_seqlens", rules.spec_of(lengths), batch_size)
    if starts is not None:
        rules.check_lengths("cu_seqlens_q", rules.spec_of(starts), batch_size + 1)
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        rules.check_bound(name, bound)
    rules.check_bound("num_splits", num_splits)
    rules.check_heads(num_heads_q, num_heads_kv, num_heads_kv, [], [])
    head_dim_v = headdim if headdim_v is None else headdim_v
    rules.check_head_dims(headdim, headdim, head_dim_v)
    left, right = rules.window(tuple(window_size), causal)  # type: ignore[arg-type]
    bounds = ScheduleBounds(
        batch_size, int(max_seqlen_q), int(max_seqlen_k), num_heads_q, num_heads_kv, headdim,
        head_dim_v, parse_scalar_type(qkv_dtype, "qkv_dtype"), page_size, left, right,
        bool(has_softcap), int(num_splits),
    )  # fmt: skip
    if not on_host(cache_seqlens=lengths, cu_seqlens_q=starts, out=out):
        raise NotImplementedError(
            "schedules on a GPU come with the attention kernels, which are not built in this "
            "release; NumPy arrays run on the CPU"
        )
    buffer = array_module(lengths).empty(0, np.int32) if out is None else out
    return SchedulerMetadata(buffer, bounds)


def check_metadata(metadata: SchedulerMetadata, problem: AttentionProblem) -> None:
    """Refuse a schedule that was made for other bounds.

    Raises
    ------
    TypeError
        It is not what `get_scheduler_metadata` returns.
    ValueError
        It was made for something else; names what differs.
    """
    if not isinstance(metadata, SchedulerMetadata):
        raise TypeError(
            f"scheduler_metadata is {type(metadata).__name__}; pass what get_scheduler_metadata "
            "returned"
        )
    given = {f.name: getattr(metadata.bounds, f.name) for f in fields(ScheduleBounds)}
    asked = {name: getattr(problem, name) for name in given if name != "has_softcap"}
    asked["has_softcap"] = problem.softcap > 0
    differ = [
        f"{n}={given[n]!r} (the call has {asked[n]!r})" for n in given if given[n] != asked[n]
    ]
    if differ:
        raise ValueError(f"scheduler_metadata was made for {', '.join(differ)}")
