"""Launches of the portable attention kernels, from bounds alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .compile import native_arch
from .device import DeviceInfo
from .dtypes import BF16, E4M3, E5M2, FP16, ScalarType
from .params import ParamsLayout
from .plan import Plan
from .problem import AttentionProblem
from .variant import Variant

__all__ = [
    "ATTENTION_PARAMS",
    "NEVER_SPLIT",
    "AttentionPlan",
    "attention_plans",
    "attention_variants",
    "make_attention_plan",
]

_POINTERS = (
    *("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
    *("alibi_slopes", "sink", "q_descale", "k_descale", "v_descale"),
    *("partial_out", "partial_lse"),
)
_STRIDES = (
    *("q_token", "q_head", "k_block", "k_token", "k_head", "v_block", "v_token", "v_head"),
    *("out_token", "out_head", "lse_head", "lse_token", "table_row"),
    *("alibi_batch", "alibi_head", "sink", "q_descale_batch", "q_descale_head"),
    *("k_descale_batch", "k_descale_head", "v_descale_batch", "v_descale_head"),
)
_NUMBERS = (
    *("batch", "total_q", "heads_q", "heads_kv", "group", "head_dim", "head_dim_v", "page_size"),
    *("window_left", "window_right", "chunk", "blocks_a_request", "row_block"),
    *("q_type", "out_type", "sink_type"),
    *("q_vectorised", "k_vectorised", "v_vectorised", "out_vectorised"),
)
ATTENTION_PARAMS = ParamsLayout(
    *((name, "ptr") for name in _POINTERS),
    *((f"{name}_stride", "i64") for name in _STRIDES),
    *((name, "i32") for name in _NUMBERS),
    *((name, "f32") for name in ("softmax_scale", "v_scale", "softcap")),
)

NEVER_SPLIT = 1 << 30
"""A chunk of keys that no request reaches the end of."""

_THREADS = 128
_SMALLEST_CHUNK = 128
_LARGEST_WORKSPACE = 1 << 28
_STATIC_BYTES = 256  # of shared memory that a kernel takes besides its tiles, at most
_MOST_SPLITS = 128  # as the combine kernel has it
_WAVES = 8  # blocks a slot of the device, at most, for the sake of splitting
_BUCKETS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_CACHES = ((FP16, FP16), (BF16, BF16), (FP16, E4M3), (FP16, E5M2))


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
    """

    forward: Plan
    combine: Plan | None
    splits: int
    chunk: int
    blocks_a_request: int
    row_block: int
    partial_rows: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """What is compiled: type of the products, of the cache, head bucket and tile shape."""

    compute: ScalarType
    cache: ScalarType
    head_dim: int
    head_dim_v: int
    row_tiles: int
    key_warps: int

    @property
    def keys(self) -> int:
        return 64 if self.head_dim <= 128 else 32

    @property
    def rows(self) -> int:
        return 64 * self.row_tiles // self.key_warps

    @property
    def smem_bytes(self) -> int:
        """As mainloop/fwd_sm80.cuh lays it out: queries, two stages, their rows, row infos."""
        stage = self.keys * (self.head_dim + self.head_dim_v) * 2
        return self.rows * (self.head_dim * 2 + 12) + 2 * (stage + self.keys * 16)

    def variant(self, arch: str, score_mod: bool) -> Variant:
        shape = f"d{self.head_dim}" + (
            "" if self.head_dim == self.head_dim_v else f"_{self.head_dim_v}"
        )
        kind = "decode" if self.key_warps > 1 else f"m{self.rows}"
        name = f"attention_fwd_sm80_{self.compute.name}_{self.cache.name}_{shape}_{kind}"
        return Variant(
            "attention_fwd_sm80.cu",
            name + ("_mod" if score_mod else ""),
            arch,
            (
                ("COMPUTE_TYPE", self.compute.code),
                ("HEAD_DIM", self.head_dim),
                ("HEAD_DIM_V", self.head_dim_v),
                ("KEY_TILE", self.keys),
                ("KEY_WARPS", self.key_warps),
                ("KV_TYPE", self.cache.code),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("ROW_TILES", self.row_tiles),
                ("SCORE_MOD", int(score_mod)),
                ("SMEM_NBYTES", self.smem_bytes),
            ),
        )


def _shapes(
    arch: str, cache: ScalarType, head_dim: int, score_mod: bool
) -> tuple[tuple[int, int], ...]:
    """(row tiles a warp, warps that split keys) that there are: as far as registers reach.

    Two row tiles of head size 128 take all 255 of them; compilers for 8.x need one more.
    """
    if head_dim > 128:
        return ((1, 1),)
    if cache.is_fp8 or (head_dim == 128 and (score_mod or arch.startswith("sm_8"))):
        return ((1, 4), (1, 1))
    return ((1, 4), (1, 1), (2, 1))


def _combine_variant(arch: str) -> Variant:
    return Variant(
        "attention_combine.cu",
        "attention_combine",
        arch,
        (("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),),
    )


def attention_variants(arch: str) -> Iterator[Variant]:
    """All that the portable family can ask for."""
    for compute, cache in _CACHES:
        for head_dim, head_dim_v in _BUCKETS:
            for score_mod in (False, True):
                for shape in _shapes(arch, cache, head_dim, score_mod):
                    tile = _Tile(compute, cache, head_dim, head_dim_v, *shape)
                    yield tile.variant(arch, score_mod)
    yield _combine_variant(arch)


@lru_cache(maxsize=4096)
def make_attention_plan(
    problem: AttentionProblem, info: DeviceInfo, workspace_limit: int = _LARGEST_WORKSPACE
) -> AttentionPlan:
    """The launches of a problem on a device; splits are lowered to fit ``workspace_limit``."""
    workspace_limit = min(workspace_limit, _LARGEST_WORKSPACE)
    tile = _choose_tile(problem, info)
    blocks, blocks_a_request = _row_blocks(problem, tile.rows)
    chunk, splits = _choose_splits(problem, info, tile, blocks, workspace_limit)
    arch = native_arch(info.capability)
    forward = Plan(
        tile.variant(arch, _score_mod(problem)),
        (problem.num_heads_kv * blocks, 1, splits),
        (_THREADS, 1, 1),
        tile.smem_bytes,
        _partial_bytes(problem, splits),
    )
    rows = problem.total_q * problem.num_heads_q
    combine = None
    if splits > 1:
        combine = Plan(_combine_variant(arch), (rows, 1, 1), (_THREADS, 1, 1))
    return AttentionPlan(
        forward,
        combine,
        splits,
        chunk,
        blocks_a_request,
        tile.rows,
        rows * splits if splits > 1 else 0,
    )


def attention_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need, those of the problem first.

    Their workspace is enough for any of the calls.
    """
    plan = make_attention_plan(problem, info)
    nbytes = _largest_workspace(problem, info)
    forwards = {plan.forward.variant: plan.forward}
    score_mod, arch = _score_mod(problem), native_arch(info.capability)
    for tile in _tiles(problem, info).values():
        if tile.key_warps == 1 or not problem.batch_invariant:
            variant = tile.variant(arch, score_mod)
            forwards.setdefault(
                variant, Plan(variant, (1, 1, 1), (_THREADS, 1, 1), tile.smem_bytes)
            )
    plans = list(forwards.values())
    if nbytes:
        plans.append(plan.combine or Plan(_combine_variant(arch), (1, 1, 1), (_THREADS, 1, 1)))
    return [replace(plan, workspace_bytes=nbytes) for plan in plans]


def _largest_workspace(problem: AttentionProblem, info: DeviceInfo) -> int:
    """Of any call within the bounds: planned splits end where the device is full many times."""
    if problem.batch_invariant or problem.num_splits == 1:
        return 0
    most = min(problem.num_splits or _MOST_SPLITS, _MOST_SPLITS)
    rows = problem.total_q * problem.num_heads_q * most
    if not problem.num_splits:
        full = (tile.rows * _resident(tile, info) for tile in _tiles(problem, info).values())
        rows = min(rows, _WAVES * max(full))
    return min(rows * (problem.head_dim_v + 1) * 4, _LARGEST_WORKSPACE)


def _partial_bytes(problem: AttentionProblem, splits: int) -> int:
    rows = problem.total_q * problem.num_heads_q * splits
    return rows * (problem.head_dim_v + 1) * 4 if splits > 1 else 0


def _score_mod(problem: AttentionProblem) -> bool:
    return problem.softcap > 0 or problem.has_alibi


def _tiles(problem: AttentionProblem, info: DeviceInfo) -> dict[tuple[int, int], _Tile]:
    """The tiles that serve a problem on a device, by (row tiles a warp, warps over keys)."""
    cache, arch = problem.kv_type, native_arch(info.capability)
    head_dim, head_dim_v = next(
        b for b in _BUCKETS if problem.head_dim <= b[0] and problem.head_dim_v <= b[1]
    )
    compute = FP16 if cache.is_fp8 else cache
    tiles = {
        shape: _Tile(compute, cache, head_dim, head_dim_v, *shape)
        for shape in _shapes(arch, cache, head_dim, _score_mod(problem))
    }
    room = info.smem_optin - _STATIC_BYTES
    return {shape: tile for shape, tile in tiles.items() if tile.smem_bytes <= room}


def _choose_tile(problem: AttentionProblem, info: DeviceInfo) -> _Tile:
    tiles = _tiles(problem, info)
    rows = min(problem.max_seqlen_q, problem.total_q) * problem.group_size
    if rows <= 16 and (1, 4) in tiles and not problem.batch_invariant:
        return tiles[1, 4]
    if rows > 64 and (2, 1) in tiles:
        wide = tiles[2, 1]
        if _row_blocks(problem, wide.rows)[0] * problem.num_heads_kv >= info.num_sms:
            return wide
    return tiles[1, 1]


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
    tile: _Tile,
    blocks: int,
    workspace_limit: int,
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have."""
    wanted, visible = problem.num_splits, _visible(problem, tile.rows)
    items = blocks * problem.num_heads_kv
    rows = problem.total_q * problem.num_heads_q
    if wanted == 1 or problem.batch_invariant or not items or rows >= 1 << 31:
        return NEVER_SPLIT, 1
    if wanted == 0:
        wanted = _planned_splits(info, tile, items, visible)
    for count in range(min(wanted, _MOST_SPLITS, -(-visible // tile.keys)), 1, -1):
        chunk = -(-visible // count // tile.keys) * tile.keys
        splits = _chunks(problem, visible, chunk)
        if splits <= wanted and _partial_bytes(problem, splits) <= workspace_limit:
            return (chunk, splits) if splits > 1 else (NEVER_SPLIT, 1)
    return NEVER_SPLIT, 1


def _resident(tile: _Tile, info: DeviceInfo) -> int:
    """Blocks that run at the same time, about."""
    return info.num_sms * max(1, min(4, info.smem_optin // (tile.smem_bytes + 1024)))


def _planned_splits(info: DeviceInfo, tile: _Tile, items: int, visible: int) -> int:
    """The fewest pieces that keep the device nearly as busy as any number of them."""
    resident = _resident(tile, info)
    if items >= 4 * resident:
        return 1
    most = max(1, min(_MOST_SPLITS, visible // _SMALLEST_CHUNK, _WAVES * resident // items))

    def busy(count: int) -> float:
        waves = items * count / resident
        return waves / -(-items * count // resident)

    best = max(busy(count) for count in range(1, most + 1))
    return next(count for count in range(1, most + 1) if busy(count) >= 0.85 * best)
