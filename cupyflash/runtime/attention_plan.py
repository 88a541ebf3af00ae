"""Launches of the portable attention kernels, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .attention_params import ATTENTION_PARAMS
from .attention_tiles import Tile, attention_variants, combine_variant, score_mod, tiles_of
from .compile import native_arch
from .device import RESERVED_SMEM, DeviceInfo
from .plan import LARGEST_WORKSPACE, Plan
from .problem import AttentionProblem
from .span_plan import DECODE_ROWS, SpanPlan, make_span_plan, serves
from .spans import schedule_plan
from .splits import MOST_SPLITS, NEVER_SPLIT, choose_chunk, fewest_pieces, visible_keys

__all__ = [
    "ATTENTION_PARAMS",
    "AttentionPlan",
    "attention_plans",
    "attention_variants",
    "combine_plan",
    "make_attention_plans",
    "row_blocks",
    "visible_to_rows",
]

_COMBINE_THREADS = 128
_SMALLEST_CHUNK = 128
_WAVES = 8  # blocks a slot of the device, at most, for the sake of splitting


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One or two launches.

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
    skipped_rows : int
        Requests of so many rows are left to another launch.
    """

    forward: Plan
    combine: Plan | None
    splits: int
    chunk: int
    blocks_a_request: int
    row_block: int
    partial_rows: int
    skipped_rows: int


@lru_cache(maxsize=4096)
def make_attention_plans(
    problem: AttentionProblem, info: DeviceInfo, workspace_limit: int | None = None
) -> tuple[SpanPlan | AttentionPlan, ...]:
    """The launches of a problem on a device in their order; one after the other uses the workspace.

    Where short and long requests may meet, the short ones are served before. Splits are lowered to
    fit ``workspace_limit``.
    """
    limit = LARGEST_WORKSPACE
    if workspace_limit is not None:
        limit = min(limit, workspace_limit)
    tile, decode = _choose_tile(problem, info), _decode_tile(problem, info)
    spans = _spans(problem, info, tile, decode, limit)
    # The table of a large batch has to fit, split or not.
    if spans is None or not _fits(spans, workspace_limit):
        narrow = tiles_of(problem, info)["narrow"]
        return (_plan(problem, info, narrow if tile == decode else tile, 0, limit),)
    if tile == decode:
        return (spans,)
    return spans, _plan(problem, info, tile, DECODE_ROWS, limit)


def _fits(spans: SpanPlan, workspace_limit: int | None) -> bool:
    return workspace_limit is None or spans.memory.nbytes <= workspace_limit


def _spans(
    problem: AttentionProblem, info: DeviceInfo, tile: Tile, decode: Tile | None, limit: int
) -> SpanPlan | None:
    """The launch that serves all requests, or the short ones before the rest; None for neither."""
    if decode is None:
        return None
    if tile == decode:
        return make_span_plan(problem, info, decode, limit)
    every = problem.total_q >= problem.batch * problem.max_seqlen_q
    if every or problem.group_size > DECODE_ROWS:
        return None
    return make_span_plan(_short(problem), info, decode, limit, DECODE_ROWS)


def _short(problem: AttentionProblem) -> AttentionProblem:
    """The bounds of the requests that the decode tile takes."""
    return replace(
        problem, max_seqlen_q=min(problem.max_seqlen_q, DECODE_ROWS // problem.group_size)
    )


def _plan(
    problem: AttentionProblem, info: DeviceInfo, tile: Tile, skipped_rows: int, limit: int
) -> AttentionPlan:
    rows = problem.total_q * problem.num_heads_q
    blocks, blocks_a_request = row_blocks(problem, tile.rows)
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
        combine_plan(problem, info) if splits > 1 else None,
        splits,
        chunk,
        blocks_a_request,
        tile.rows,
        rows * splits if splits > 1 else 0,
        skipped_rows,
    )


def combine_plan(problem: AttentionProblem, info: DeviceInfo) -> Plan:
    """The launch that merges the partial results of a problem."""
    variant, rows = combine_variant(native_arch(info.capability)), problem.total_q
    return Plan(variant, (rows * problem.num_heads_q, 1, 1), (_COMBINE_THREADS, 1, 1))


def attention_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need, those of the problem first.

    Their workspace is enough for any of the calls.
    """
    plans = make_attention_plans(problem, info)
    nbytes = _largest_workspace(problem, info)
    forwards = {plan.forward.variant: plan.forward for plan in reversed(plans)}
    modified, arch = score_mod(problem), native_arch(info.capability)
    for tile in tiles_of(problem, info).values():
        if tile.key_warps == 1 or not problem.batch_invariant:
            variant = tile.variant(arch, modified)
            forwards.setdefault(
                variant, Plan(variant, (1, 1, 1), (tile.threads, 1, 1), tile.smem_bytes)
            )
    found = list(forwards.values())
    if nbytes:
        found.append(combine_plan(problem, info))
        if _decode_tile(problem, info) is not None:
            found.append(schedule_plan(problem.batch, info.capability))
    return [replace(plan, workspace_bytes=nbytes) for plan in found]


def _largest_workspace(problem: AttentionProblem, info: DeviceInfo) -> int:
    """Of any call within the bounds."""
    if problem.batch_invariant:
        return 0
    tile, decoding = _decode_tile(problem, info), 0
    if tile is not None and problem.group_size <= DECODE_ROWS:
        decoding = make_span_plan(_short(problem), info, tile, LARGEST_WORKSPACE).memory.nbytes
    if problem.num_splits == 1:
        return decoding
    rows = problem.total_q * problem.num_heads_q
    if problem.num_splits:
        rows *= min(problem.num_splits, MOST_SPLITS)
    else:
        tiles = tiles_of(problem, info).values()
        full = max(tile.rows * _resident(tile, info) for tile in tiles if tile.key_warps == 1)
        rows = min(rows * MOST_SPLITS, _WAVES * full)
    nbytes = rows * (problem.head_dim_v + 1) * 4
    return min(max(nbytes, decoding), LARGEST_WORKSPACE)


def _partial_bytes(problem: AttentionProblem, rows: int, splits: int) -> int:
    return rows * splits * (problem.head_dim_v + 1) * 4 if splits > 1 else 0


def _most_rows(problem: AttentionProblem) -> int:
    """Rows of a request at most."""
    return min(problem.max_seqlen_q, problem.total_q) * problem.group_size


def _decode_tile(problem: AttentionProblem, info: DeviceInfo) -> Tile | None:
    """The decode tile, if it may serve requests of few rows."""
    tile = None if problem.batch_invariant else tiles_of(problem, info).get("decode")
    return tile if tile is not None and serves(problem, tile) else None


def _choose_tile(problem: AttentionProblem, info: DeviceInfo) -> Tile:
    tiles, decode = tiles_of(problem, info), _decode_tile(problem, info)
    rows = _most_rows(problem)
    if rows <= DECODE_ROWS and decode is not None:
        return decode
    if rows > 64 and "wide" in tiles:
        wide = tiles["wide"]
        if row_blocks(problem, wide.rows)[0] * problem.num_heads_kv >= info.num_sms:
            return wide
    return tiles["narrow"]


def row_blocks(problem: AttentionProblem, rows: int) -> tuple[int, int]:
    """Row blocks to launch, and how many of them each request has (0: found in the kernel)."""
    if not problem.batch:
        return 0, 0
    per_request = -(-problem.max_seqlen_q * problem.group_size // rows)
    ragged = problem.total_q * problem.group_size // rows + problem.batch
    if per_request * problem.batch <= ragged:
        return per_request * problem.batch, per_request
    return ragged, 0


def visible_to_rows(problem: AttentionProblem, rows: int) -> int:
    """Keys that a row block sees at most."""
    return visible_keys(problem, -(-(rows - 1) // problem.group_size) + 1)


def _choose_splits(
    problem: AttentionProblem,
    info: DeviceInfo,
    tile: Tile,
    blocks: int,
    rows: int,
    workspace_limit: int,
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have."""
    wanted, visible = problem.num_splits, visible_to_rows(problem, tile.rows)
    items = blocks * problem.num_heads_kv
    if wanted == 1 or problem.batch_invariant or not items or rows >= 1 << 31:
        return NEVER_SPLIT, 1
    if wanted == 0:
        wanted = _planned_splits(info, tile, items, visible)
    return choose_chunk(
        problem, visible, tile.keys, wanted,
        lambda splits: _partial_bytes(problem, rows, splits) <= workspace_limit,
    )  # fmt: skip


def _resident(tile: Tile, info: DeviceInfo) -> int:
    """Blocks that run at the same time, about."""
    return info.num_sms * max(1, min(4, info.smem_optin // (tile.smem_bytes + RESERVED_SMEM)))


def _planned_splits(info: DeviceInfo, tile: Tile, items: int, visible: int) -> int:
    """The fewest pieces that keep the device nearly as busy as any number of them."""
    resident = _resident(tile, info)
    if items >= 4 * resident:
        return 1
    most = min(MOST_SPLITS, visible // _SMALLEST_CHUNK, _WAVES * resident // items)
    return fewest_pieces(items, resident, most)
