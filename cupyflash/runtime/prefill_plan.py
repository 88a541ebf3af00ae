"""Launches of the Hopper prefill kernel, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from .attention_args import Tiling
from .attention_plan import combine_plan
from .device import DeviceInfo
from .divisors import log2
from .dtypes import BF16, FP16
from .fp8_tile import Fp8Tile, fp8_refusal
from .plan import LARGEST_WORKSPACE, Plan
from .prefill_tail import NO_TAIL, Tail, choose_tail, largest_tail_bytes, tail_bytes
from .prefill_tile import (
    PREFILL_PARAMS,
    AnyTile,
    prefill_tile,
    prefill_tiles,
    prefill_variant,
    prefill_variants,
)
from .problem import AttentionProblem
from .splits import MOST_SPLITS, NEVER_SPLIT, choose_chunk, fewest_pieces, visible_keys
from .widen_tile import WidenTile, widen_refusal

__all__ = [
    "PREFILL_PARAMS",
    "PrefillPlan",
    "make_prefill_plan",
    "prefill_plans",
    "prefill_refusal",
    "prefill_variants",
]

_SMALLEST_CHUNK = 512  # keys
_WAVES = 4  # tiles a multiprocessor, at most, for the sake of splitting
_L2_SHARE = 32 << 20  # of keys and values that tiles read at the same time
_MOST_ITEMS = 1 << 31


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One launch, or two where keys are split.

    Attributes
    ----------
    attend : Plan
        Its workspace holds the partial results, then one int32 an item.
    combine : Plan or None
    tiling : Tiling
    numbers : tuple of int
        The fields of ``PrefillParams`` after its pointers, the last two (a page that lies outside,
        most rows of requests that are skipped) excepted.
    rows, pack, box_keys : int
        Rows of a tile; query heads in them; keys of a TMA box.
    partial_bytes : int
    tail : Tail
        The last tiles, of the 8-bit kernel, whose keys are cut.
    workspace_at : int
        Where in the workspace it begins: what is before belongs to a launch that runs beside it.
    """

    attend: Plan
    combine: Plan | None
    tiling: Tiling
    numbers: tuple[int, ...]
    rows: int
    pack: int
    box_keys: int
    partial_bytes: int
    tail: Tail
    workspace_at: int = 0


def prefill_refusal(problem: AttentionProblem, info: DeviceInfo) -> str:
    """Why the prefill kernel does not serve a problem; empty where it does."""
    if info.capability != (9, 0):
        return "it is for compute capability 9.0"
    if not problem.batch or not problem.total_q:
        return "there are no queries"
    kinds = {problem.q_type, problem.kv_type, problem.out_type}
    if len(kinds) > 1 or not kinds <= {FP16, BF16}:
        over_8_bits = problem.kv_type.is_fp8 and not problem.q_type.is_fp8
        refused = widen_refusal(problem) if over_8_bits else fp8_refusal(problem)
        if refused:
            return refused
    if problem.softmax_scale <= 0 and not problem.kv_type.is_fp8:
        return f"softmax_scale={problem.softmax_scale}: it takes positive ones"
    page = problem.page_size
    if page is not None and _box_keys(problem) % 8:
        return f"page size {page}: it takes multiples of 8, from 16"
    if _items(problem, prefill_tile(problem))[0] * MOST_SPLITS >= _MOST_ITEMS:
        return "there are more than 2^24 tiles"
    return ""


def _box_keys(problem: AttentionProblem) -> int:
    tile, page = prefill_tile(problem), problem.page_size
    keys = tile.raw_rows if isinstance(tile, WidenTile) else tile.keys
    return keys if page is None else gcd(page, keys) if page >= 16 else 1


def _pack(problem: AttentionProblem, tile: AnyTile) -> int:
    return gcd(problem.group_size, tile.rows & -tile.rows)  # a power of two


def _items(problem: AttentionProblem, tile: AnyTile) -> tuple[int, int]:
    """Tiles at most, and how many of them every request and head group has (0: by its length)."""
    pack = _pack(problem, tile)
    tokens = tile.rows // pack
    per_request = -(-min(problem.max_seqlen_q, problem.total_q) // tokens)
    ragged = problem.total_q // tokens + problem.batch
    groups = problem.num_heads_q // pack
    if per_request * problem.batch <= ragged:
        return per_request * problem.batch * groups, per_request
    return ragged * groups, 0


@lru_cache(maxsize=4096)
def make_prefill_plan(
    problem: AttentionProblem,
    info: DeviceInfo,
    workspace_limit: int | None = None,
    most_skipped: int = 0,
    workspace_at: int = 0,
) -> PrefillPlan:
    """The launches of a problem that is not refused; splits fit ``workspace_limit``.

    Requests of at most ``most_skipped`` rows (queries times heads of a group) are left to a decode
    launch before, which runs beside this one and has the first ``workspace_at`` bytes.
    """
    tile = prefill_tile(problem)
    pack = _pack(problem, tile)
    limit = LARGEST_WORKSPACE if workspace_limit is None else workspace_limit
    tiles, blocks = _items(problem, tile)
    chunk, splits = _choose_splits(problem, info, tile, tiles, limit - workspace_at)
    tail = NO_TAIL
    if blocks and splits == 1 and not most_skipped:
        tail = _choose_tail(problem, info, tile, tiles, limit - workspace_at - tiles * 4)
    pieces = max(0, tiles - tail.whole) * tail.cut
    items = min(tiles, tail.whole) + pieces if pieces else tiles * splits
    per_key = problem.kv_type.itemsize * (problem.head_dim + problem.head_dim_v)
    # Only where tiles differ in length do many of them have to be under way to be ordered.
    share = _L2_SHARE // per_key if problem.window_right >= 0 and problem.window_left < 0 else 0
    heads = max(1, share // max(1, problem.max_seqlen_k))
    together = heads * problem.group_size // pack
    rows = problem.total_q * problem.num_heads_q * splits if splits > 1 else 0
    partial_bytes = rows * (problem.head_dim_v + 1) * 4
    if pieces and isinstance(tile, Fp8Tile):
        partial_bytes = tail_bytes(tile, pieces)
    attend = Plan(
        prefill_variant(problem, tile),
        (min(info.num_sms, items), 1, 1),
        (tile.threads, 1, 1),
        tile.smem_bytes,
        workspace_at + partial_bytes + items * 4,
        most_skipped > 0,
    )
    groups = problem.num_heads_q // pack
    pairs = (problem.batch if blocks else 1) * groups
    # Of many short requests only the last are walked by falling number of keys.
    last = info.num_sms // 2
    lead = pairs - last if share and blocks and last <= min(together, pairs // 4) else 0
    return PrefillPlan(
        attend,
        combine_plan(problem, info) if splits > 1 else None,
        Tiling(chunk, 0, tile.rows // pack * problem.group_size, rows, most_skipped),
        (
            *(items, splits, log2(pack), groups, blocks, lead, together),
            *(pairs, share, _box_keys(problem)),
        ),
        tile.rows,
        pack,
        _box_keys(problem),
        partial_bytes,
        tail,
        workspace_at,
    )


def _choose_tail(
    problem: AttentionProblem, info: DeviceInfo, tile: AnyTile, tiles: int, limit: int
) -> Tail:
    """Only where tiles are known to be alike, and the caller leaves splits to this."""
    even = problem.total_q >= problem.batch * problem.max_seqlen_q
    asked = problem.num_splits or problem.batch_invariant
    if not isinstance(tile, Fp8Tile) or not even or asked:
        return NO_TAIL
    return choose_tail(problem, info, tile, tiles, tile.rows // _pack(problem, tile), limit)


def prefill_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch of the prefill kernel that calls within a problem's bounds may need.

    Their workspace is enough for any of the calls: smaller ones are split into more pieces.
    """
    if prefill_refusal(problem, info):
        return []
    plan, tiles = make_prefill_plan(problem, info).attend, prefill_tiles(problem)
    nbytes = max(plan.workspace_bytes, *(_largest_workspace(problem, info, tile) for tile in tiles))
    plans = [
        replace(
            plan,
            variant=prefill_variant(problem, tile),
            block=(tile.threads, 1, 1),
            smem_bytes=tile.smem_bytes,
        )
        for tile in tiles
    ]
    return [replace(each, workspace_bytes=nbytes) for each in (*plans, combine_plan(problem, info))]


def _largest_workspace(problem: AttentionProblem, info: DeviceInfo, tile: AnyTile) -> int:
    if problem.num_splits == 1 or problem.batch_invariant:
        return 0
    tiles = _items(problem, tile)[0]
    if problem.num_splits:
        pieces = tiles * min(problem.num_splits, MOST_SPLITS)
    else:
        pieces = _WAVES * info.num_sms
    nbytes = pieces * (tile.rows * (problem.head_dim_v + 1) + 1) * 4
    if isinstance(tile, Fp8Tile) and not problem.num_splits:
        nbytes = max(nbytes, largest_tail_bytes(tile, info) + (tiles + pieces) * 4)
    return min(nbytes, LARGEST_WORKSPACE)


def _choose_splits(
    problem: AttentionProblem, info: DeviceInfo, tile: AnyTile, tiles: int, limit: int
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have."""
    visible = visible_keys(problem, tile.rows // _pack(problem, tile))
    wanted = problem.num_splits
    if wanted == 1 or problem.batch_invariant or not tiles:
        return NEVER_SPLIT, 1
    if wanted == 0:
        wanted = _planned_splits(info, tiles, visible)
    row_bytes = problem.total_q * problem.num_heads_q * (problem.head_dim_v + 1) * 4
    return choose_chunk(
        problem, visible, tile.keys, wanted,
        lambda splits: splits * (row_bytes + tiles * 4) <= limit,
    )  # fmt: skip


def _planned_splits(info: DeviceInfo, tiles: int, visible: int) -> int:
    """The fewest pieces that keep the device nearly as busy as any number of them."""
    if tiles >= info.num_sms:
        return 1
    most = min(MOST_SPLITS, visible // _SMALLEST_CHUNK, _WAVES * info.num_sms // tiles)
    return fewest_pieces(tiles, info.num_sms, most)
