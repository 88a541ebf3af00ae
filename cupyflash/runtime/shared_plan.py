"""Launches of decoding with shared prefixes, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from .device import DeviceInfo
from .plan import Plan
from .prefix_search import search_variant
from .problem import AttentionProblem
from .shared_tile import (
    MOST_LEVELS,
    SCRATCH_BYTES,
    SHARE_ROWS,
    UNIT_BYTES,
    SharedTile,
    schedule_shared_variant,
)

__all__ = [
    "MOST_SHARED_REQUESTS",
    "SharedPlan",
    "make_shared_plan",
    "shared_plans",
    "shared_refusal",
]

MOST_SHARED_REQUESTS = 1024
"""Requests of a batch: a thread each in schedule_shared.cu."""

_THREADS, _OWN_WARPS = 512, 4
_SCHEDULE_BLOCKS = 16
_MOST_ROWS = {64: 16, 128: 8}  # of a request, by head size
_BOX = 16  # keys of a box of own keys
_BLOCK = 64  # shared keys
_MOST_BYTES = 1 << 29
_MOST_PARTIAL_ROWS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """The schedule and the attention.

    Attributes
    ----------
    schedule, attend : Plan
    tile : SharedTile
    levels : int
    sizes : tuple of (str, int)
        Bytes of each array in the workspace by its name in ``SharedParams``, in order.
    tile_rows : int
        Partial rows of shared keys.
    row_block : int
        Rows of a request, at most.
    box_keys : int
        Of a TMA box of shared keys.
    most_tokens : int
        Of a request.
    """

    schedule: Plan
    attend: Plan
    tile: SharedTile
    levels: int
    sizes: tuple[tuple[str, int], ...]
    tile_rows: int
    row_block: int
    box_keys: int
    most_tokens: int


def shared_refusal(problem: AttentionProblem, info: DeviceInfo, levels: int = 1) -> str:
    """Why a shared prefix is not read once for a problem; empty where it is."""
    if info.capability != (9, 0):
        return "the kernel is for compute capability 9.0"
    if problem.batch_invariant:
        return "batch_invariant=True: what a request shares depends on the others"
    if problem.num_splits == 1:
        return "num_splits=1: shared and own keys are merged"
    if not problem.batch or not problem.total_q:
        return "there are no queries"
    if problem.batch > MOST_SHARED_REQUESTS:
        return f"{problem.batch} requests; the schedule takes {MOST_SHARED_REQUESTS}"
    if not 1 <= levels <= MOST_LEVELS:
        return f"{levels} levels; there are 1 to {MOST_LEVELS}"
    return _operands_refusal(problem) or _size_refusal(problem, info, levels)


def _operands_refusal(problem: AttentionProblem) -> str:
    widest = max(problem.head_dim, problem.head_dim_v)
    rows = _tokens(problem) * problem.group_size
    if problem.kv_type.is_fp8 or problem.q_type.is_fp8:
        return "8-bit operands: shared keys are multiplied in 16 bits"
    if problem.has_q_v:
        return "latent attention has kernels of its own"
    if widest > 128:
        return f"head size {widest}: at most 128"
    if problem.head_dim % 8:
        return f"head size {problem.head_dim}: no multiple of 8"
    if not problem.page_size:
        return "packed keys: requests share pages"
    if problem.page_size % _BOX:
        return f"pages of {problem.page_size} tokens: no multiple of {_BOX}"
    most = _MOST_ROWS[_bucket(problem)]
    if rows > most:
        return f"a request may have {rows} rows a KV head, at most {most} at this head size"
    if problem.has_alibi:
        return "ALiBi counts from each request's own position"
    if problem.window_left >= 0 and problem.window_left < problem.max_seqlen_k:
        return "a window ends at a key of each request's own"
    return ""


def _size_refusal(problem: AttentionProblem, info: DeviceInfo, levels: int) -> str:
    plan = make_shared_plan(problem, info, levels)
    if plan.attend.workspace_bytes > _MOST_BYTES:
        return f"{plan.attend.workspace_bytes} bytes of partial results"
    return ""


def _bucket(problem: AttentionProblem) -> int:
    return 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128


def _tokens(problem: AttentionProblem) -> int:
    return min(problem.max_seqlen_q, problem.total_q)


@lru_cache(maxsize=4096)
def make_shared_plan(problem: AttentionProblem, info: DeviceInfo, levels: int = 1) -> SharedPlan:
    """The launches of a problem with so many levels that is not refused."""
    head_dim = _bucket(problem)
    tokens = _tokens(problem)
    rows = tokens * problem.group_size
    tile = SharedTile(problem.kv_type, head_dim, 8 if rows <= 8 else 16)
    batch, heads, ctas = problem.batch, problem.num_heads_kv, info.num_sms
    groups, units = levels * batch, batch * tokens * heads
    tile_rows = 2 * levels * problem.total_q * problem.num_heads_q + SHARE_ROWS * ctas
    partial_rows = tile_rows + (batch * heads + _OWN_WARPS * ctas) * rows
    sizes = (
        ("partial_out", partial_rows * head_dim * 4),
        ("partial_state", partial_rows * 8),
        ("own", batch * 32),
        ("own_starts", _OWN_WARPS * ctas * 48),
        ("groups", groups * 32),
        ("group_starts", ctas * 16),
        ("units", units * UNIT_BYTES),
        ("group_line", (groups + 1) * 4),
        ("tokens", levels * problem.total_q * 4),
        ("arrivals", 4),
    )
    rounded = tuple((name, -(-nbytes // 16) * 16) for name, nbytes in sizes)
    nbytes = sum(size for _, size in rounded)
    threads = -(-batch // 32) * 32
    blocks = max(1, min(_SCHEDULE_BLOCKS, -(-units // threads)))
    return SharedPlan(
        Plan(schedule_shared_variant(), (blocks, 1, 1), (threads, 1, 1), SCRATCH_BYTES, 0, True),
        Plan(tile.variant, (ctas, 1, 1), (_THREADS, 1, 1), tile.smem_bytes, nbytes, True),
        tile,
        levels,
        rounded,
        tile_rows,
        rows,
        gcd(problem.page_size or _BLOCK, _BLOCK),
        tokens,
    )


def shared_plans(problem: AttentionProblem, info: DeviceInfo, levels: int) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need for prefixes of so many levels.

    None where there are no levels, or the kernel does not serve the problem.
    """
    if not levels or shared_refusal(problem, info, levels):
        return []
    plan = make_shared_plan(problem, info, levels)
    few = make_shared_plan(replace(problem, max_seqlen_q=1), info, levels)
    search = Plan(search_variant(), (1, 1, 1), (1, 1, 1))
    return [plan.attend, replace(few.attend, workspace_bytes=0), plan.schedule, search]
