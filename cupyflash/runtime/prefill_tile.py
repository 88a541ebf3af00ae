"""What is compiled of the Hopper prefill kernel, and which of it serves a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from .attention_params import ATTENTION_PARAMS
from .dtypes import BF16, FP16, ScalarType
from .fp8_tile import Fp8Tile, fp8_tile, fp8_variants
from .params import ParamsLayout
from .problem import AttentionProblem
from .variant import Variant

__all__ = [
    "PREFILL_PARAMS",
    "TILE_ROWS",
    "PrefillTile",
    "has_score_mod",
    "prefill_tile",
    "prefill_variant",
    "prefill_variants",
]

PREFILL_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("counter", "links")),
    *(
        (name, "i32")
        for name in (
            *("items", "splits", "pack_shift", "head_groups", "blocks", "together", "pairs"),
            *("l2_keys", "box_keys", "outside_page", "most_skipped"),
        )
    ),
)
"""The layout of ``core/prefill_params.cuh``."""

TILE_ROWS = 128
_ARCH = "sm_90a"
_ALIGNMENT = 1024
# Of a thread that loads and one that computes, by the rows of a tile.
_REGISTERS = {128: (56, 224), 192: (32, 160), 256: (32, 112)}
_REST_BYTES = 1664  # of shared memory besides the tiles: PrefillShared::Rest


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """What is compiled for a head bucket: the tile, buffers of queries and of keys."""

    head_dim: int
    head_dim_v: int
    keys: int
    query_stages: int
    stages: int
    turns: bool = True
    rows: int = TILE_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        return _REGISTERS[self.rows]

    @property
    def threads(self) -> int:
        return 128 + 2 * self.rows

    @property
    def smem_bytes(self) -> int:
        k, v = (-(-size // 64) * 128 for size in (self.head_dim, self.head_dim_v))
        tiles = self.query_stages * self.rows * k + self.stages * self.keys * (k + v)
        return _ALIGNMENT + tiles + _REST_BYTES

    def variant(self, kind: ScalarType, score_mod: bool) -> Variant:
        shape = f"d{self.head_dim}" + (
            "" if self.head_dim == self.head_dim_v else f"_{self.head_dim_v}"
        )
        rows = "" if self.rows == TILE_ROWS else f"_m{self.rows}"
        name = f"attention_fwd_sm90_{kind.name}_{shape}_n{self.keys}{rows}"
        return Variant(
            "attention_fwd_sm90.cu",
            name + ("_mod" if score_mod else ""),
            _ARCH,
            (
                ("COMPUTE_REGISTERS", self.registers[1]),
                ("COMPUTE_TYPE", kind.code),
                ("HEAD_DIM", self.head_dim),
                ("HEAD_DIM_V", self.head_dim_v),
                ("KEY_STAGES", self.stages),
                ("KEY_TILE", self.keys),
                ("LOAD_REGISTERS", self.registers[0]),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("PREFILL_NBYTES", PREFILL_PARAMS.nbytes),
                ("QUERY_STAGES", self.query_stages),
                ("SCORE_MOD", int(score_mod)),
                ("SMEM_NBYTES", self.smem_bytes),
                ("TILE_ROWS", self.rows),
                ("TURNS", int(self.turns)),
            ),
        )


# Head size 64 waits for its exponentials: a third and a fourth computing warpgroup fill the time.
_WIDE_64 = PrefillTile(64, 64, 128, 3, 3, rows=192)
_TALL_64 = PrefillTile(64, 64, 64, 2, 4, rows=256)
_FEW_KEYS = 1024
_TILES = (
    PrefillTile(64, 64, 128, 3, 3),
    PrefillTile(96, 96, 128, 3, 2),
    PrefillTile(128, 128, 128, 3, 2),
    PrefillTile(192, 128, 128, 1, 2),
    PrefillTile(192, 192, 112, 1, 2),
    PrefillTile(256, 256, 80, 1, 2),
)
# Modified scores take registers.
_MOD_TILES = (
    _TILES[0],
    PrefillTile(96, 96, 112, 3, 2),
    *_TILES[2:4],
    PrefillTile(192, 192, 96, 1, 2),
    PrefillTile(256, 256, 48, 1, 3),
)


def prefill_variants(arch: str) -> Iterator[Variant]:
    """All that the Hopper prefill kernel can be asked for."""
    if arch == "sm_90":
        for kind in (FP16, BF16):
            for score_mod in (False, True):
                for tile in _MOD_TILES if score_mod else (*_TILES, _WIDE_64, _TALL_64):
                    yield tile.variant(kind, score_mod)
        yield from fp8_variants(PREFILL_PARAMS.nbytes)


def prefill_tile(problem: AttentionProblem) -> PrefillTile | Fp8Tile:
    """The narrowest bucket; of head size 64, tiles of as many rows as the lengths are worth."""
    return fp8_tile(problem) if problem.kv_type.is_fp8 else _tile_16bit(problem)


def prefill_variant(problem: AttentionProblem) -> Variant:
    """The kernel of a problem that is not refused."""
    score_mod = has_score_mod(problem)
    if problem.kv_type.is_fp8:
        return fp8_tile(problem).variant(PREFILL_PARAMS.nbytes, score_mod)
    return _tile_16bit(problem).variant(problem.kv_type, score_mod)


def _tile_16bit(problem: AttentionProblem) -> PrefillTile:
    score_mod = has_score_mod(problem)
    found = next(
        tile
        for tile in (_MOD_TILES if score_mod else _TILES)
        if problem.head_dim <= tile.head_dim and problem.head_dim_v <= tile.head_dim_v
    )
    return found if found.head_dim > 64 or score_mod else _tile_64(problem)


def _tile_64(problem: AttentionProblem) -> PrefillTile:
    """Batch-invariant calls always have the same one."""
    left, right = problem.window_left, problem.window_right
    if problem.batch_invariant:
        return _WIDE_64
    rows = problem.max_seqlen_q * gcd(problem.group_size, 64)
    if left < 0 and right < 0 and rows > TILE_ROWS:
        wide, tall = (-(-rows // tile.rows) * tile.rows for tile in (_WIDE_64, _TALL_64))
        return _TALL_64 if tall * 1.04 < wide else _WIDE_64
    seen = problem.max_seqlen_k if left < 0 else left + max(right, 0)
    # Masks leave a part of tall tiles idle, which counts where tiles have few keys.
    return _TILES[0] if rows <= TILE_ROWS or seen <= _FEW_KEYS else _WIDE_64


def has_score_mod(problem: AttentionProblem) -> bool:
    """Whether scores are modified: by a soft cap or ALiBi."""
    return problem.softcap > 0 or problem.has_alibi
