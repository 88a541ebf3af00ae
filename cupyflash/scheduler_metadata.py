"""The schedule of a step, made once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .fa_version import capability_of, resolve_need
from .families import FAMILIES
from .runtime import env
from .runtime.arrays import place, spec_of
from .runtime.call import Call
from .runtime.dtypes import BF16, ScalarType, parse_scalar_type
from .runtime.problem import AttentionProblem
from .runtime.rules.latent import is_latent
from .runtime.rules.numbers import MOST_TOKENS, flag, non_negative, token_bound
from .runtime.rules.operands import check_head_dims, check_heads
from .runtime.rules.score import window
from .runtime.rules.sequences import check_lengths
from .support import Need

__all__ = [
    "HEADER",
    "ScheduleBounds",
    "SchedulerMetadata",
    "check_metadata",
    "get_scheduler_metadata",
]

HEADER = 4
"""int32 words in front of every schedule: its hash (two words), the batch size, and 0."""


class ScheduleBounds(NamedTuple):
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
    num_splits: int
    has_softcap: bool


_INT32 = np.dtype(np.int32)
_of_problem = attrgetter(*ScheduleBounds._fields[:-1])


@dataclass(frozen=True)
class SchedulerMetadata:
    """A schedule and what it is for.

    Attributes
    ----------
    buffer : array, int32
        The schedule, where the arrays are. On the CPU nothing is scheduled, and it is only the
        header that says what it is for.
    bounds : ScheduleBounds
    """

    buffer: Any
    bounds: ScheduleBounds

    @property
    def parameter_hash(self) -> tuple[int, int]:
        """The bounds as two int32, the same in every process."""
        return _hash(self.bounds)


@lru_cache(maxsize=1024)
def _hash(bounds: ScheduleBounds) -> tuple[int, int]:
    import hashlib

    text = repr(tuple(bounds._replace(kv_type=bounds.kv_type.name)))  # type: ignore[arg-type]
    low, high = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<i4")
    return int(low), int(high)


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
    window_size: tuple[int, int] | None = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    fa_version: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> SchedulerMetadata:
    """Make the schedule that every layer of a step shares.

    Parameters
    ----------
    batch_size, max_seqlen_q, max_seqlen_k : int
        As the calls will have them.
    num_heads_q, num_heads_kv, headdim : int
    cache_seqlens : array [batch], int32
        Keys of each request.
    qkv_dtype : str or dtype
        Of k and v: ``"bfloat16"``, ``"float16"``, ``"float32"`` or an fp8 spelling.
    headdim_v : int, optional
        `headdim` if None. Above 256 the calls have ``q_v``.
    cu_seqlens_q : array [batch + 1], int32, optional
        Where each request's queries start; one query a request if None.
    page_size : int, optional
        Block size of the cache; None = packed keys.
    causal, window_size, num_splits, fa_version
        As the calls will pass them.
    has_softcap : bool
        Whether the calls pass a softcap.
    out : array, int32, optional
        Where to write the schedule, so that its address stays (CUDA graphs); what is left of it is
        set to 0.
    stream : int or stream, optional
        The current stream of the arrays' device if None. The CPU has none.

    Returns
    -------
    SchedulerMetadata

    Raises
    ------
    TypeError, ValueError
        Lengths of another dtype or size, bounds that no call could have, a buffer that is too
        small (says the size needed).
    NotImplementedError
        No version can run such calls on this GPU.
    """
    given, names = (cache_seqlens, cu_seqlens_q, out), ("cache_seqlens", "cu_seqlens_q", "out")
    (lengths, starts, out), on_host = place(names, given, stream, required=1)
    bounds = _bounds(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v,
        qkv_dtype, page_size, causal, window_size, has_softcap, num_splits,
    )  # fmt: skip
    check_lengths("cache_seqlens", spec_of(lengths), bounds.batch)
    if starts is not None:
        check_lengths("cu_seqlens_q", spec_of(starts), bounds.batch + 1)
    if out is not None and (out.dtype != np.int32 or out.ndim != 1 or out.size < HEADER):
        raise ValueError(f"out is {out.dtype} {out.shape}; it must be int32 [at least {HEADER}]")
    if not on_host:
        need = Need(
            bounds.head_dim, bounds.head_dim_v, _query_type(bounds.kv_type), bounds.kv_type,
            latent=is_latent(bounds.head_dim_v),
        )  # fmt: skip
        version = resolve_need(need, capability_of(lengths), fa_version)
        buffer = FAMILIES[version].schedule(bounds, lengths, starts, out, stream)
        return SchedulerMetadata(buffer, bounds)
    buffer = np.empty(HEADER, np.int32) if out is None else out
    buffer[:HEADER] = (*_hash(bounds), bounds.batch, 0)
    buffer[HEADER:] = 0
    return SchedulerMetadata(buffer, bounds)


def _bounds(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    headdim_v: int | None,
    qkv_dtype: Any,
    page_size: int | None,
    causal: bool,
    window_size: tuple[int, int] | None,
    has_softcap: bool,
    num_splits: int,
) -> ScheduleBounds:
    check_heads(num_heads_q, num_heads_kv, num_heads_kv, [], [])
    head_dim_v = headdim if headdim_v is None else headdim_v
    check_head_dims(headdim, headdim, head_dim_v, is_latent(head_dim_v))
    if page_size is not None and non_negative("page_size", page_size) < 1:
        raise ValueError("page_size=0 must be at least 1, or None for packed keys")
    left, right = window(window_size, flag("causal", causal))
    return ScheduleBounds(
        non_negative("batch_size", batch_size),
        token_bound("max_seqlen_q", max_seqlen_q),
        token_bound("max_seqlen_k", max_seqlen_k),
        num_heads_q,
        num_heads_kv,
        headdim,
        head_dim_v,
        parse_scalar_type(qkv_dtype, "qkv_dtype"),
        page_size,
        left,
        right,
        min(non_negative("num_splits", num_splits), MOST_TOKENS),
        flag("has_softcap", has_softcap),
    )


def _query_type(kv_type: ScalarType) -> ScalarType:
    return BF16 if kv_type.is_fp8 else kv_type


def _asked(problem: AttentionProblem) -> ScheduleBounds:
    return ScheduleBounds._make((*_of_problem(problem), problem.softcap > 0))


def check_metadata(metadata: Any, call: Call) -> None:
    """Refuse a schedule that was made for other bounds.

    A bare buffer is known by its header, which is read on the CPU, and on a GPU under
    ``CUPYFLASH_CHECK=1``.

    Raises
    ------
    TypeError
        It is not what `get_scheduler_metadata` returns, or the buffer of it.
    ValueError
        It was made for something else; names what differs.
    """
    kept = call.layout.kept
    asked = kept.get(ScheduleBounds) or call.layout.keep(
        ScheduleBounds, lambda: _asked(call.problem)
    )
    if isinstance(metadata, SchedulerMetadata):
        if metadata.bounds != asked:
            pairs = zip(ScheduleBounds._fields, metadata.bounds, asked, strict=True)
            differ = [f"{n}={_show(a)} (the call has {_show(b)})" for n, a, b in pairs if a != b]
            raise ValueError(f"scheduler_metadata was made for {', '.join(differ)}")
        metadata = metadata.buffer
    (buffer, _), on_host = place(("scheduler_metadata", "q"), (metadata, call.arrays.q))
    if buffer.dtype != _INT32 or buffer.ndim != 1 or buffer.size < HEADER:
        raise TypeError(
            f"scheduler_metadata is {buffer.dtype} {buffer.shape}; pass what "
            "get_scheduler_metadata returned, or its int32 buffer"
        )
    if on_host or env.check():
        head = buffer[:HEADER].get() if hasattr(buffer, "get") else buffer[:HEADER]
        if tuple(map(int, head[:2])) != _hash(asked):
            raise ValueError(
                "the header of scheduler_metadata says that it was made for other bounds than "
                f"{', '.join(f'{n}={_show(v)}' for n, v in asked._asdict().items())}"
            )


def _show(value: Any) -> str:
    return value.name if isinstance(value, ScalarType) else repr(value)
