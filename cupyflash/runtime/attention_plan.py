"""Launches of the portable attention kernels, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .attention_params import ATTENTION_PARAMS
from .attention_tiles import Tile, attention_variants, combine_variant, score_mod, tiles_of
from .compile import native_arch
from .device import DeviceInfo
from .plan import Plan
from .problem import AttentionProblem
from .splits import MOST_SPLITS, fewest_pieces

__all__ = [
    "ATTENTION_PARAMS",
    "NEVER_SPLIT",
    "AttentionPlan",
    "attention_plans",
    "attention_variants",
    "combine_plan",
    "make_attention_plan",
]

NEVER_SPLIT = 1 << 30
"""A chunk of keys that no request reaches the end of."""

_COMBINE_THREADS = 128
_DECODE_ROWS = 16  # of a request, for the decode tile
_SMALLEST_CHUNK = 128
_EVEN_CHUNK = 4096
_LARGEST_WORKSPACE = 1 << 28
_WAVES = 8  # blocks a slot of the device, at most, for the sake of splitting


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One or two launches; as many more where short and long requests may meet.

    Attributes
    ----------
    forward : Plan
    combine : Plan or None
        None where keys are never split.
    splits : int
        Partial results a row may have.
    chunk : int
        Keys a split takes at most.
    blocks_a_request : int
        Row blocks of every request; 0 where the kernel finds its request by ``cu_seqlens_q``.
    row_block : int
        Rows (token and head of a group) of a block.
    partial_rows : int
        Rows of all partial results together.
    most_rows : int
        Which requests are served; see core/attention_params.cuh.
    short : AttentionPlan or None
        Launched before, for requests of few rows: decode steps of a batch that has prefills too.
    """

    forward: Plan
    combine: Plan | None
    splits: int
    chunk: int
    blocks_a_request: int
    row_block: int
    partial_rows: int
    most_rows: int
    short: AttentionPlan | None = None


@lru_cache(maxsize=4096)
def make_attention_plan(
    problem: AttentionProblem, info: DeviceInfo, workspace_limit: int = _LARGEST_WORKSPACE
) -> AttentionPlan:
    """The launches of a problem on a device; splits are lowered to fit ``workspace_limit``."""
    limit = min(workspace_limit, _LARGEST_WORKSPACE)
    tile = _choose_tile(problem, info)
    if not _is_mixed(problem, info, tile):
        return _plan(problem, info, tile, min(_most_rows(problem), _DECODE_ROWS), limit)
    short = _plan(problem, info, tiles_of(problem, info)["decode"], _DECODE_ROWS, limit)
    plan = _plan(problem, info, tile, -_DECODE_ROWS, limit)
    nbytes = max(p.forward.workspace_bytes for p in (plan, short))
    return replace(plan, short=short, forward=replace(plan.forward, workspace_bytes=nbytes))


def _plan(
    problem: AttentionProblem, info: DeviceInfo, tile: Tile, most_rows: int, limit: int
) -> AttentionPlan:
    decodes = tile.key_warps > 1
    rows = problem.total_q * problem.num_heads_q
    if decodes:
        rows = problem.batch * problem.num_heads_kv * most_rows
        blocks, blocks_a_request = problem.batch, 1
    else:
        blocks, blocks_a_request = _row_blocks(problem, tile.rows)
    chunk, splits = _choose_splits(problem, info, tile, blocks, rows, limit)
    forward = Plan(
        tile.variant(native_arch(info.capability), score_mod(problem)),
        (problem.num_heads_kv * blocks, 1, splits),
        (tile.threads, 1, 1),
        tile.smem_bytes,
        _partial_bytes(problem, rows, splits),
    )
    return AttentionPlan(
        forward,
        combine_plan(problem, info, rows) if splits > 1 else None,
        splits,
        chunk,
        blocks_a_request,
        tile.rows,
        rows * splits if splits > 1 else 0,
        most_rows if decodes or most_rows < 0 else 0,
    )


def combine_plan(problem: AttentionProblem, info: DeviceInfo, rows: int | None = None) -> Plan:
    """The launch that merges the partial results of a problem, or of so many rows."""
    rows = problem.total_q * problem.num_heads_q if rows is None else rows
    variant = combine_variant(native_arch(info.capability))
    return Plan(variant, (rows, 1, 1), (_COMBINE_THREADS, 1, 1))


def attention_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need, those of the problem first.

    Their workspace is enough for any of the calls.
    """
    plan = make_attention_plan(problem, info)
    nbytes = _largest_workspace(problem, info)
    forwards = {p.forward.variant: p.forward for p in (plan, plan.short) if p}
    modified, arch = score_mod(problem), native_arch(info.capability)
    for tile in tiles_of(problem, info).values():
        if tile.key_warps == 1 or not problem.batch_invariant:
            variant = tile.variant(arch, modified)
            forwards.setdefault(
                variant, Plan(variant, (1, 1, 1), (tile.threads, 1, 1), tile.smem_bytes)
            )
    plans = list(forwards.values())
    if nbytes:
        plans.append(plan.combine or combine_plan(problem, info, 1))
    return [replace(plan, workspace_bytes=nbytes) for plan in plans]


def _largest_workspace(problem: AttentionProblem, info: DeviceInfo) -> int:
    """Of any call within the bounds."""
    if problem.batch_invariant or problem.num_splits == 1:
        return 0
    most = min(problem.num_splits or MOST_SPLITS, MOST_SPLITS)
    tiles = tiles_of(problem, info)
    rows = problem.total_q * problem.num_heads_q
    short = problem.batch * problem.num_heads_kv * _DECODE_ROWS if "decode" in tiles else 0
    if problem.num_splits:
        rows = max(rows, short) * most
    else:
        full = _WAVES * max(tile.rows * _resident(tile, info) for tile in tiles.values())
        rows = max(min(rows * most, full), short * min(most, _even_splits(problem)))
    return min(rows * (problem.head_dim_v + 1) * 4, _LARGEST_WORKSPACE)


def _partial_bytes(problem: AttentionProblem, rows: int, splits: int) -> int:
    return rows * splits * (problem.head_dim_v + 1) * 4 if splits > 1 else 0


def _most_rows(problem: AttentionProblem) -> int:
    """Rows of a request at most."""
    return min(problem.max_seqlen_q, problem.total_q) * problem.group_size


def _is_mixed(problem: AttentionProblem, info: DeviceInfo, tile: Tile) -> bool:
    """Whether there may be requests for the decode tile beside those for another."""
    return (
        tile.key_warps == 1
        and "decode" in tiles_of(problem, info)
        and not problem.batch_invariant
        and problem.group_size <= _DECODE_ROWS
        and problem.total_q < problem.batch * problem.max_seqlen_q
    )


def _choose_tile(problem: AttentionProblem, info: DeviceInfo) -> Tile:
    tiles = tiles_of(problem, info)
    rows = _most_rows(problem)
    if rows <= _DECODE_ROWS and "decode" in tiles and not problem.batch_invariant:
        return tiles["decode"]
    if rows > 64 and "wide" in tiles:
        wide = tiles["wide"]
        if _row_blocks(problem, wide.rows)[0] * problem.num_heads_kv >= info.num_sms:
            return wide
    return tiles["narrow"]


def _row_blocks(problem: AttentionProblem, rows: int) -> tuple[int, int]:
    """Row blocks to launch, and how many of them each request has (0: found in the kernel)."""
    if not problem.batch:
        return 0, 0
    per_request = -(-problem.max_seqlen_q * problem.group_size // rows)
    ragged = problem.total_q * problem.group_size // rows + problem.batch
    if per_request * problem.batch <= ragged:
        return per_request * problem.batch, per_request
    return ragged, 0


def _visible(problem: AttentionProblem, rows: int) -> int:
    """Keys that a row block sees at most."""
    left, right = problem.window_left, problem.window_right
    if left < 0 or right < 0:
        return problem.max_seqlen_k
    tokens = -(-(rows - 1) // problem.group_size) + 1
    return min(problem.max_seqlen_k, left + right + tokens)


def _chunks(problem: AttentionProblem, visible: int, chunk: int) -> int:
    """Chunks that visible keys can touch; chunks lie at multiples of their size."""
    return max(1, min(-(-problem.max_seqlen_k // chunk), (visible + chunk - 2) // chunk + 1))


def _choose_splits(
    problem: AttentionProblem,
    info: DeviceInfo,
    tile: Tile,
    blocks: int,
    rows: int,
    workspace_limit: int,
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have."""
    wanted, visible = problem.num_splits, _visible(problem, tile.rows)
    items = blocks * problem.num_heads_kv
    if wanted == 1 or problem.batch_invariant or not items or rows >= 1 << 31:
        return NEVER_SPLIT, 1
    if wanted == 0:
        wanted = _planned_splits(info, tile, items, visible)
        if tile.key_warps > 1 and problem.batch > 1 and items < 16 * _resident(tile, info):
            wanted = max(wanted, _even_splits(problem))
    for count in range(min(wanted, MOST_SPLITS, -(-visible // tile.keys)), 1, -1):
        chunk = -(-visible // count // tile.keys) * tile.keys
        splits = _chunks(problem, visible, chunk)
        if splits <= wanted and _partial_bytes(problem, rows, splits) <= workspace_limit:
            return (chunk, splits) if splits > 1 else (NEVER_SPLIT, 1)
    return NEVER_SPLIT, 1


def _even_splits(problem: AttentionProblem) -> int:
    """Pieces so short that the last ones of a batch of unequal lengths keep no one waiting."""
    return problem.max_seqlen_k // _EVEN_CHUNK


def _resident(tile: Tile, info: DeviceInfo) -> int:
    """Blocks that run at the same time, about."""
    return info.num_sms * max(1, min(4, info.smem_optin // (tile.smem_bytes + 1024)))


def _planned_splits(info: DeviceInfo, tile: Tile, items: int, visible: int) -> int:
    """The fewest pieces that keep the device nearly as busy as any number of them."""
    resident = _resident(tile, info)
    if items >= 4 * resident:
        return 1
    most = min(MOST_SPLITS, visible // _SMALLEST_CHUNK, _WAVES * resident // items)
    return fewest_pieces(items, resident, most)
