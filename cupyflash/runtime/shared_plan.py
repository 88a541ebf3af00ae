"""Launches of decoding with shared prefixes, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from .device import DeviceInfo
from .dtypes import FP16
from .plan import Plan
from .prefix_search import SEARCH_CTAS, SEARCH_THREADS, search_variant
from .problem import AttentionProblem
from .shared_tile import (
    MOST_LEVELS,
    ROW_BYTES,
    SCRATCH_BYTES,
    SEARCHED_SCRATCH_BYTES,
    SHARE_ROWS,
    START_BYTES,
    SharedTile,
    schedule_shared_variant,
    share_prefixes_variant,
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
_SEARCH = (4 * SEARCH_CTAS, 1, 1), (SEARCH_THREADS, 1, 1)  # clusters search alike
_MOST_ROWS = 64  # of a request
_BLOCK_ROWS = {64: 16, 128: 8}  # that read own keys together, by head size
_FEW_ROWS = 2  # of a CTA
_FEW_REQUESTS = 32  # a lane each
_BOX = 16  # keys of a box of own keys
_BLOCK = 64  # shared keys
_MOST_BYTES = 1 << 29
_MOST_TILES = 1 << 31  # of own keys, which lie on a line of 32-bit numbers


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """The schedule and the attention.

    Attributes
    ----------
    schedule, search, attend, attend_after : Plan
        The schedule; the search that goes on to it; the attention that can make its own; the one
        that follows one.
    tile, inside_tile : SharedTile
        After a schedule; where the attention makes its own.
    levels : int
    sizes : tuple of (str, int)
        Bytes of each array in the workspace by its name in ``SharedParams``, in order.
    tile_rows : int
        Partial rows of shared keys.
    row_block, row_blocks : int
        Rows of a request that read own keys together; blocks of so many.
    box_keys : int
        Of a TMA box of shared keys.
    most_tokens : int
        Of a request.
    inside : bool
        Whether the attention can make its schedule by itself: a thread a request.
    """

    schedule: Plan
    search: Plan
    attend: Plan
    attend_after: Plan
    tile: SharedTile
    inside_tile: SharedTile
    levels: int
    sizes: tuple[tuple[str, int], ...]
    tile_rows: int
    row_block: int
    row_blocks: int
    box_keys: int
    most_tokens: int
    inside: bool


def shared_refusal(problem: AttentionProblem, info: DeviceInfo, levels: int = 1) -> str:
    """Why a shared prefix is not read once for a problem; empty where it is."""
    if info.capability != (9, 0):
        return "the kernel is for compute capability 9.0"
    if problem.batch_invariant:
        return "batch_invariant=True: what a request shares depends on the others"
    if problem.num_splits == 1:
        return "num_splits=1: shared and own keys are merged"
    if not problem.batch or not _tokens(problem):
        return "there are no queries"
    if problem.batch > MOST_SHARED_REQUESTS:
        return f"{problem.batch} requests; the schedule takes {MOST_SHARED_REQUESTS}"
    if not 1 <= levels <= MOST_LEVELS:
        return f"{levels} levels; there are 1 to {MOST_LEVELS}"
    return _operands_refusal(problem) or _size_refusal(problem, info, levels)


def _operands_refusal(problem: AttentionProblem) -> str:
    widest = max(problem.head_dim, problem.head_dim_v)
    rows = _tokens(problem) * problem.group_size
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
    if rows > _MOST_ROWS:
        return f"a request may have {rows} rows a KV head, at most {_MOST_ROWS}"
    return ""


def _size_refusal(problem: AttentionProblem, info: DeviceInfo, levels: int) -> str:
    plan = make_shared_plan(problem, info, levels)
    if plan.attend.workspace_bytes > _MOST_BYTES:
        return f"{plan.attend.workspace_bytes} bytes of partial results"
    each = problem.max_seqlen_k // plan.tile.keys + 2
    tiles = problem.batch * problem.num_heads_kv * plan.row_blocks * each
    if tiles >= _MOST_TILES:
        return f"up to {tiles} tiles of own keys; they are counted to {_MOST_TILES - 1}"
    return ""


def _bucket(problem: AttentionProblem) -> int:
    return 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128


def _tokens(problem: AttentionProblem) -> int:
    return min(problem.max_seqlen_q, problem.total_q)


def _after_a_schedule(tile: SharedTile) -> SharedTile:
    return tile if tile.alibi else replace(tile, inside=False)


@lru_cache(maxsize=4096)
def make_shared_plan(problem: AttentionProblem, info: DeviceInfo, levels: int = 1) -> SharedPlan:
    """The launches of a problem with so many levels that is not refused."""
    head_dim = _bucket(problem)
    tokens = _tokens(problem)
    rows = tokens * problem.group_size
    ctas = info.num_sms
    tile = SharedTile(
        FP16 if problem.kv_type.is_fp8 else problem.kv_type,
        problem.kv_type,
        head_dim,
        8 if min(rows, _BLOCK_ROWS[head_dim]) <= 8 else 16,
        not problem.has_alibi and problem.batch * rows * problem.num_heads_kv <= _FEW_ROWS * ctas,
        alibi=problem.has_alibi,
    )
    row_block = min(rows, tile.rows)
    row_blocks = -(-rows // row_block)
    batch, heads = problem.batch, problem.num_heads_kv
    tile_rows = 2 * levels * problem.total_q * problem.num_heads_q + SHARE_ROWS * ctas
    partial_rows = tile_rows + (batch * heads * row_blocks + _OWN_WARPS * ctas) * row_block
    sizes = (
        ("partial_out", partial_rows * head_dim * 4),
        ("partial_state", partial_rows * 8),
        ("own", (batch + ctas) * 48),
        ("own_starts", _OWN_WARPS * ctas * 64),
        ("groups", (levels * batch + ctas) * 32),
        ("group_starts", ctas * START_BYTES),
        ("rows", 2 * batch * rows * heads * ROW_BYTES),
        ("tokens", (levels * problem.total_q + SHARE_ROWS * ctas) * 16),
        ("arrivals", 8),
    )
    rounded = tuple((name, -(-nbytes // 16) * 16) for name, nbytes in sizes)
    nbytes = sum(size for _, size in rounded)
    threads = _THREADS if batch <= _THREADS else MOST_SHARED_REQUESTS
    # With parts of rows it makes a schedule of a request a lane.
    inside_tile = replace(tile, parts=tile.parts and batch <= _FEW_REQUESTS)
    attend = Plan(
        inside_tile.variant, (ctas, 1, 1), (_THREADS, 1, 1), tile.smem_bytes, nbytes, True
    )
    return SharedPlan(
        Plan(schedule_shared_variant(), (ctas, 1, 1), (threads, 1, 1), SCRATCH_BYTES, 0, True),
        Plan(share_prefixes_variant(), *_SEARCH, SEARCHED_SCRATCH_BYTES, 0, True),
        attend,
        replace(attend, variant=_after_a_schedule(tile).variant),
        tile,
        inside_tile,
        levels,
        rounded,
        tile_rows,
        row_block,
        row_blocks,
        gcd(problem.page_size or _BLOCK, _BLOCK),
        tokens,
        batch <= _THREADS,
    )


def shared_plans(problem: AttentionProblem, info: DeviceInfo, levels: int) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need for prefixes of so many levels.

    None where there are no levels, or the kernel does not serve the problem.
    """
    if not levels or shared_refusal(problem, info, levels):
        return []
    plan = make_shared_plan(problem, info, levels)
    few = make_shared_plan(replace(problem, max_seqlen_q=1), info, levels)
    # Smaller batches have fewer rows to merge.
    merges = (False,) if problem.has_alibi else (False, True)
    tiles = {replace(one.tile, parts=parts): None for one in (plan, few) for parts in merges}
    tiles |= {_after_a_schedule(tile): None for tile in tiles}
    attend = [replace(plan.attend, variant=tile.variant) for tile in tiles]
    return [*attend, plan.schedule, plan.search, Plan(search_variant(), (1, 1, 1), (1, 1, 1))]
