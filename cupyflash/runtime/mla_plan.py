"""Launches of the portable kernels of multi-head latent attention, from bounds alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .attention_args import Tiling
from .attention_plan import ATTENTION_PARAMS, combine_plan, row_blocks, visible_to_rows
from .compile import native_arch
from .device import DeviceInfo
from .dtypes import BF16, E4M3, FP16, ScalarType
from .latent_params import LATENT_PARAMS
from .latent_plan import latent_plans, latent_refusal, latent_variant
from .plan import LARGEST_WORKSPACE, Plan
from .problem import AttentionProblem
from .splits import MOST_SPLITS, NEVER_SPLIT, choose_chunk, fewest_pieces
from .variant import Variant

__all__ = [
    "MlaPlan",
    "make_mla_plan",
    "mla_note",
    "mla_plans",
    "mla_variants",
]

_ROW_BYTES = (512 + 64) * 2  # of a cache row in shared memory
_HOPPER_ARCH = "sm_90"
_THREADS = 256
_SMALLEST_CHUNK = 256  # keys: below it, partial results outweigh them
_WAVES = 4  # blocks a multiprocessor, at most, for the sake of splitting
_LARGE, _MEDIUM, _SMALL = 227 << 10, 163 << 10, 99 << 10  # shared memory of a block
_SHARED_BYTES = dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), _LARGE)
_SHARED_BYTES.update(dict.fromkeys(("sm_80", "sm_87"), _MEDIUM))


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """One or two launches; attributes as `attention_plan.AttentionPlan`."""

    forward: Plan
    combine: Plan | None
    splits: int
    tiling: Tiling


@dataclass(frozen=True, slots=True)
class _Tile:
    """What is compiled: rows of queries, keys of a stage, stages; of those of an 8-bit cache."""

    rows: int
    keys: int
    stages: int
    stages_8bit: int

    def smem_bytes(self, cache: ScalarType) -> int:
        """As mainloop/latent_sm80.cuh lays it out: stages, parts of the scores, factors."""
        parts = 8 * 16 // self.keys
        sizes = self.stages_8bit / 2 + 1 if cache.is_fp8 else self.stages
        stages = int(sizes * self.keys * _ROW_BYTES)
        return stages + self.rows * (parts * (self.keys + 8) * 4 + 8)

    def variant(self, kind: ScalarType, cache: ScalarType, arch: str) -> Variant:
        name = kind.name if cache == kind else f"{kind.name}_{cache.name}"
        return Variant(
            "mla_decode_sm80.cu",
            f"mla_decode_sm80_{name}_m{self.rows}",
            arch,
            (
                ("COMPUTE_TYPE", kind.code),
                ("KEY_STAGES", self.stages_8bit if cache.is_fp8 else self.stages),
                ("KEY_TILE", self.keys),
                ("KV_TYPE", cache.code),
                ("LATENT_NBYTES", LATENT_PARAMS.nbytes),
                ("LATENT_ROWS", self.rows),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("SMEM_NBYTES", self.smem_bytes(cache)),
            ),
        )


# For 16 rows and for 32, the largest that fits.
_TILES = {
    _LARGE: (_Tile(16, 64, 3, 4), _Tile(32, 32, 5, 8)),
    _MEDIUM: (_Tile(16, 64, 2, 2), _Tile(32, 32, 3, 5)),
    _SMALL: (_Tile(16, 32, 2, 2), _Tile(32, 32, 2, 2)),
}


def _tiles(arch: str) -> tuple[_Tile, _Tile]:
    return _TILES[_SHARED_BYTES.get(arch, _SMALL)]


def mla_variants(arch: str) -> Iterator[Variant]:
    """All that latent attention can ask for."""
    for kind in (FP16, BF16):
        for tile in _tiles(arch):
            for cache in (kind, E4M3):
                yield tile.variant(kind, cache, arch)
        if arch == _HOPPER_ARCH:
            yield from (latent_variant(kind, side) for side in (1, 2))


@lru_cache(maxsize=1024)
def make_mla_plan(
    problem: AttentionProblem, info: DeviceInfo, workspace_limit: int | None = None
) -> MlaPlan:
    """The launches of a problem on a device; splits are lowered to fit ``workspace_limit``."""
    arch = native_arch(info.capability)
    small, large = _tiles(arch)
    most_rows = min(problem.max_seqlen_q, problem.total_q) * problem.group_size
    tile = small if most_rows <= small.rows else large
    blocks, blocks_a_request = row_blocks(problem, tile.rows)
    items = blocks * problem.num_heads_kv
    limit = LARGEST_WORKSPACE
    if workspace_limit is not None:
        limit = min(limit, workspace_limit)
    chunk, splits = _choose_splits(problem, info, tile, items, limit)
    forward = Plan(
        tile.variant(problem.q_type, problem.kv_type, arch),
        (items, 1, splits),
        (_THREADS, 1, 1),
        tile.smem_bytes(problem.kv_type),
        _partial_bytes(problem, splits),
    )
    rows = problem.total_q * problem.num_heads_q
    tiling = Tiling(chunk, blocks_a_request, tile.rows, rows * splits if splits > 1 else 0)
    combine = combine_plan(problem, info) if splits > 1 else None
    return MlaPlan(forward, combine, splits, tiling)


def mla_note(problem: AttentionProblem, info: DeviceInfo) -> str:
    """Which kernel serves a problem of version 3 whose keys start at multiples of 16 bytes."""
    refused = latent_refusal(problem, info)
    return f"portable latent; not Hopper latent: {refused}" if refused else "Hopper latent"


def mla_plans(problem: AttentionProblem, info: DeviceInfo, hopper: bool = False) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need, those of the problem first.

    Their workspace is enough for any of the calls.
    """
    plan, arch = make_mla_plan(problem, info), native_arch(info.capability)
    forwards = {plan.forward.variant: plan.forward}
    for tile in _tiles(arch):
        variant = tile.variant(problem.q_type, problem.kv_type, arch)
        nbytes = tile.smem_bytes(problem.kv_type)
        forwards.setdefault(variant, Plan(variant, (1, 1, 1), (_THREADS, 1, 1), nbytes))
    plans = [*(latent_plans(problem, info) if hopper else ()), *forwards.values()]
    nbytes = max([_largest_workspace(problem, info), *(each.workspace_bytes for each in plans)])
    if nbytes:
        plans.append(combine_plan(problem, info))
    return [replace(each, workspace_bytes=nbytes) for each in plans]


def _largest_workspace(problem: AttentionProblem, info: DeviceInfo) -> int:
    """Of any call within the bounds: planned splits end where the device is full a few times."""
    if problem.batch_invariant or problem.num_splits == 1:
        return 0
    most = min(problem.num_splits or MOST_SPLITS, MOST_SPLITS)
    rows = problem.total_q * problem.num_heads_q * most
    if not problem.num_splits:
        rows = min(rows, _WAVES * info.num_sms * _tiles(native_arch(info.capability))[1].rows)
    return min(rows * (problem.head_dim_v + 1) * 4, LARGEST_WORKSPACE)


def _partial_bytes(problem: AttentionProblem, splits: int) -> int:
    rows = problem.total_q * problem.num_heads_q * splits
    return rows * (problem.head_dim_v + 1) * 4 if splits > 1 else 0


def _choose_splits(
    problem: AttentionProblem, info: DeviceInfo, tile: _Tile, items: int, limit: int
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have."""
    visible = visible_to_rows(problem, tile.rows)
    wanted, rows = problem.num_splits, problem.total_q * problem.num_heads_q
    if wanted == 1 or problem.batch_invariant or not items or rows >= 1 << 31:
        return NEVER_SPLIT, 1
    if not wanted:
        wanted = _planned_splits(info, items, visible)
    return choose_chunk(
        problem, visible, tile.keys, wanted,
        lambda splits: _partial_bytes(problem, splits) <= limit,
    )  # fmt: skip


def _planned_splits(info: DeviceInfo, items: int, visible: int) -> int:
    """The fewest pieces that keep the device nearly as busy as any number of them."""
    most = min(MOST_SPLITS, visible // _SMALLEST_CHUNK, _WAVES * info.num_sms // items)
    return fewest_pieces(items, info.num_sms, most)
