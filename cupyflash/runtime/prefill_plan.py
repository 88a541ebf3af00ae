"""Launches of the Hopper prefill kernel, from bounds alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from .attention_args import Tiling
from .attention_plan import ATTENTION_PARAMS, NEVER_SPLIT, combine_plan
from .device import DeviceInfo
from .dtypes import BF16, FP16, ScalarType
from .fp8_tile import Fp8Tile, fp8_refusal, fp8_tile, fp8_variants
from .params import ParamsLayout
from .plan import Plan
from .problem import AttentionProblem
from .splits import MOST_SPLITS, fewest_pieces
from .variant import Variant

__all__ = [
    "PREFILL_PARAMS",
    "TILE_ROWS",
    "PrefillPlan",
    "make_prefill_plan",
    "prefill_plans",
    "prefill_refusal",
    "prefill_variants",
]

PREFILL_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("counter", "links")),
    *(
        (name, "i32")
        for name in (
            *("items", "splits", "pack_shift", "head_groups", "blocks", "together", "l2_keys"),
            *("box_keys", "outside_page", "most_skipped"),
        )
    ),
)
"""The layout of ``core/prefill_params.cuh``."""

TILE_ROWS = 128
_ARCH = "sm_90a"
_THREADS = 384
_ALIGNMENT = 1024
_REST_BYTES = 1536  # of shared memory besides the tiles: PrefillShared::Rest
_LARGEST_WORKSPACE = 1 << 28
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
    pack, box_keys : int
        Query heads in the rows of a tile; keys of a TMA box.
    partial_bytes : int
    workspace_at : int
        Where in the workspace it begins: what is before belongs to a launch that runs beside it.
    """

    attend: Plan
    combine: Plan | None
    tiling: Tiling
    numbers: tuple[int, ...]
    pack: int
    box_keys: int
    partial_bytes: int
    workspace_at: int = 0


@dataclass(frozen=True, slots=True)
class _Tile:
    """What is compiled for a head bucket: keys of a tile, buffers of queries and of keys."""

    head_dim: int
    head_dim_v: int
    keys: int
    query_stages: int
    stages: int
    turns: bool = True

    @property
    def smem_bytes(self) -> int:
        k, v = (-(-size // 64) * 128 for size in (self.head_dim, self.head_dim_v))
        tiles = self.query_stages * TILE_ROWS * k + self.stages * self.keys * (k + v)
        return _ALIGNMENT + tiles + _REST_BYTES

    def variant(self, kind: ScalarType, score_mod: bool) -> Variant:
        shape = f"d{self.head_dim}" + (
            "" if self.head_dim == self.head_dim_v else f"_{self.head_dim_v}"
        )
        name = f"attention_fwd_sm90_{kind.name}_{shape}_n{self.keys}"
        return Variant(
            "attention_fwd_sm90.cu",
            name + ("_mod" if score_mod else ""),
            _ARCH,
            (
                ("COMPUTE_TYPE", kind.code),
                ("HEAD_DIM", self.head_dim),
                ("HEAD_DIM_V", self.head_dim_v),
                ("KEY_STAGES", self.stages),
                ("KEY_TILE", self.keys),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("PREFILL_NBYTES", PREFILL_PARAMS.nbytes),
                ("QUERY_STAGES", self.query_stages),
                ("SCORE_MOD", int(score_mod)),
                ("SMEM_NBYTES", self.smem_bytes),
                ("TURNS", int(self.turns)),
            ),
        )


_FULL_64 = _Tile(64, 64, 192, 2, 3)
_TILES = (
    _Tile(64, 64, 128, 2, 3),
    _Tile(96, 96, 128, 2, 2),
    _Tile(128, 128, 128, 2, 2),
    _Tile(192, 128, 128, 1, 2),
    _Tile(192, 192, 112, 1, 2),
    _Tile(256, 256, 80, 1, 2),
)
# Modified scores take registers.
_MOD_TILES = (*_TILES[:4], _Tile(192, 192, 96, 1, 2), _Tile(256, 256, 48, 1, 3))


def prefill_variants(arch: str) -> Iterator[Variant]:
    """All that the Hopper prefill kernel can be asked for."""
    if arch == "sm_90":
        for kind in (FP16, BF16):
            for score_mod in (False, True):
                for tile in _MOD_TILES if score_mod else (*_TILES, _FULL_64):
                    yield tile.variant(kind, score_mod)
        yield from fp8_variants(PREFILL_PARAMS.nbytes)


def _tile(problem: AttentionProblem) -> _Tile | Fp8Tile:
    """The narrowest bucket; without a mask, wide tiles of keys pay for narrow heads."""
    return fp8_tile(problem) if problem.kv_type.is_fp8 else _tile_16bit(problem)


def _variant(problem: AttentionProblem) -> Variant:
    score_mod = _score_mod(problem)
    if problem.kv_type.is_fp8:
        return fp8_tile(problem).variant(PREFILL_PARAMS.nbytes, score_mod)
    return _tile_16bit(problem).variant(problem.kv_type, score_mod)


def _tile_16bit(problem: AttentionProblem) -> _Tile:
    score_mod = _score_mod(problem)
    found = next(
        tile
        for tile in (_MOD_TILES if score_mod else _TILES)
        if problem.head_dim <= tile.head_dim and problem.head_dim_v <= tile.head_dim_v
    )
    unmasked = problem.window_left < 0 and problem.window_right < 0
    return _FULL_64 if found.head_dim == 64 and unmasked and not score_mod else found


def _score_mod(problem: AttentionProblem) -> bool:
    return problem.softcap > 0 or problem.has_alibi


def prefill_refusal(problem: AttentionProblem, info: DeviceInfo) -> str:
    """Why the prefill kernel does not serve a problem; empty where it does."""
    if info.capability != (9, 0):
        return "it is for compute capability 9.0"
    if not problem.batch or not problem.total_q:
        return "there are no queries"
    kinds = {problem.q_type, problem.kv_type, problem.out_type}
    if len(kinds) > 1 or not kinds <= {FP16, BF16}:
        refused = fp8_refusal(problem)
        if refused:
            return refused
    if problem.softmax_scale <= 0 and not problem.kv_type.is_fp8:
        return f"softmax_scale={problem.softmax_scale}: it takes positive ones"
    page = problem.page_size
    if page is not None and _box_keys(problem) % 8:
        return f"page size {page}: it takes multiples of 8, from 16"
    if _items(problem, _tile(problem))[0] * MOST_SPLITS >= _MOST_ITEMS:
        return "there are more than 2^24 tiles"
    return ""


def _box_keys(problem: AttentionProblem) -> int:
    keys = _tile(problem).keys
    page = problem.page_size
    return keys if page is None else gcd(page, keys) if page >= 16 else 1


def _pack(problem: AttentionProblem) -> int:
    return gcd(problem.group_size, TILE_ROWS)


def _items(problem: AttentionProblem, tile: _Tile | Fp8Tile) -> tuple[int, int]:
    """Tiles at most, and how many of them every request and head group has (0: by its length)."""
    tokens = TILE_ROWS // _pack(problem)
    per_request = -(-min(problem.max_seqlen_q, problem.total_q) // tokens)
    ragged = problem.total_q // tokens + problem.batch
    groups = problem.num_heads_q // _pack(problem)
    if per_request * problem.batch <= ragged:
        return per_request * problem.batch * groups, per_request
    return ragged * groups, 0


@lru_cache(maxsize=4096)
def make_prefill_plan(
    problem: AttentionProblem,
    info: DeviceInfo,
    workspace_limit: int = _LARGEST_WORKSPACE,
    most_skipped: int = 0,
    workspace_at: int = 0,
) -> PrefillPlan:
    """The launches of a problem that is not refused; splits fit ``workspace_limit``.

    Requests of at most ``most_skipped`` rows (queries times heads of a group) are left to a decode
    launch before, which runs beside this one and has the first ``workspace_at`` bytes.
    """
    tile, pack = _tile(problem), _pack(problem)
    workspace_limit -= workspace_at
    tiles, blocks = _items(problem, tile)
    chunk, splits = _choose_splits(problem, info, tile, tiles, workspace_limit)
    items = tiles * splits
    per_key = problem.kv_type.itemsize * (problem.head_dim + problem.head_dim_v)
    # Only where tiles differ in length do many of them have to be under way to be ordered.
    share = _L2_SHARE // per_key if problem.window_right >= 0 and problem.window_left < 0 else 0
    heads = max(1, share // max(1, problem.max_seqlen_k))
    together = heads * problem.group_size // pack
    rows = problem.total_q * problem.num_heads_q * splits if splits > 1 else 0
    partial_bytes = rows * (problem.head_dim_v + 1) * 4
    attend = Plan(
        _variant(problem),
        (min(info.num_sms, items), 1, 1),
        (_THREADS, 1, 1),
        tile.smem_bytes,
        workspace_at + partial_bytes + items * 4,
        most_skipped > 0,
    )
    groups = problem.num_heads_q // pack
    return PrefillPlan(
        attend,
        combine_plan(problem, info) if splits > 1 else None,
        Tiling(chunk, 0, TILE_ROWS // pack * problem.group_size, rows, -most_skipped),
        (
            *(items, splits, pack.bit_length() - 1, groups, blocks, together, share),
            _box_keys(problem),
        ),
        pack,
        _box_keys(problem),
        partial_bytes,
        workspace_at,
    )


def prefill_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch of the prefill kernel that calls within a problem's bounds may need.

    Their workspace is enough for any of the calls: smaller ones are split into more pieces.
    """
    if prefill_refusal(problem, info):
        return []
    plan = make_prefill_plan(problem, info)
    nbytes = max(plan.attend.workspace_bytes, _largest_workspace(problem, info))
    plans = [plan.attend, combine_plan(problem, info)]
    return [replace(each, workspace_bytes=nbytes) for each in plans]


def _largest_workspace(problem: AttentionProblem, info: DeviceInfo) -> int:
    if problem.num_splits == 1 or problem.batch_invariant:
        return 0
    tiles = _items(problem, _tile(problem))[0]
    if problem.num_splits:
        pieces = tiles * min(problem.num_splits, MOST_SPLITS)
    else:
        pieces = _WAVES * info.num_sms
    return min(pieces * (TILE_ROWS * (problem.head_dim_v + 1) + 1) * 4, _LARGEST_WORKSPACE)


def _visible(problem: AttentionProblem) -> int:
    """Keys that a tile sees at most."""
    left, right = problem.window_left, problem.window_right
    if left < 0 or right < 0:
        return problem.max_seqlen_k
    return min(problem.max_seqlen_k, left + right + TILE_ROWS // _pack(problem))


def _choose_splits(
    problem: AttentionProblem, info: DeviceInfo, tile: _Tile | Fp8Tile, tiles: int, limit: int
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have."""
    visible, wanted = _visible(problem), problem.num_splits
    if wanted == 1 or problem.batch_invariant or not tiles:
        return NEVER_SPLIT, 1
    if wanted == 0:
        wanted = _planned_splits(info, tiles, visible)
    row_bytes = problem.total_q * problem.num_heads_q * (problem.head_dim_v + 1) * 4
    for count in range(min(wanted, MOST_SPLITS, -(-visible // tile.keys)), 1, -1):
        chunk = -(-visible // count // tile.keys) * tile.keys
        # Chunks lie at multiples of their size.
        splits = min(-(-problem.max_seqlen_k // chunk), (visible + chunk - 2) // chunk + 1)
        if splits <= wanted and splits * (row_bytes + tiles * 4) <= limit:
            return (chunk, splits) if splits > 1 else (NEVER_SPLIT, 1)
    return NEVER_SPLIT, 1


def _planned_splits(info: DeviceInfo, tiles: int, visible: int) -> int:
    """The fewest pieces that keep the device nearly as busy as any number of them."""
    if tiles >= info.num_sms:
        return 1
    most = min(MOST_SPLITS, visible // _SMALLEST_CHUNK, _WAVES * info.num_sms // tiles)
    return fewest_pieces(tiles, info.num_sms, most)
