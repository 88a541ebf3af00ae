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
from .widen_tile import WidenTile, widen_tile, widen_variants

__all__ = [
    "FP8_PREFILL_PARAMS",
    "PREFILL_PARAMS",
    "TILE_ROWS",
    "AnyTile",
    "PrefillTile",
    "has_score_mod",
    "prefill_fp8_cache_variants",
    "prefill_ones_variants",
    "prefill_tile",
    "prefill_tiles",
    "prefill_variant",
    "prefill_variants",
]

_FIELDS = (
    *((name, "ptr") for name in ("counter", "links")),
    *(
        (name, "i32")
        for name in (
            *("items", "splits", "pack_shift", "head_groups", "blocks", "lead", "together"),
            *("pairs", "l2_keys", "box_keys", "outside_page", "most_skipped"),
        )
    ),
)
PREFILL_PARAMS = ParamsLayout(*_FIELDS)
"""The layout of ``core/prefill_params.cuh``."""

FP8_PREFILL_PARAMS = ParamsLayout(
    *_FIELDS,
    ("pieces", "ptr"),
    ("arrivals", "ptr"),
    ("whole", "i32"),
    ("cut", "i32"),
    ("inverse", "u32"),
)
"""The same of its ``TailParams``."""

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


AnyTile = PrefillTile | Fp8Tile | WidenTile

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


# Up to so many keys that a tile sees, ...
_KEYS = (1024, 4096)
# ... and above: what a row of another tile costs, beside one of the tile above, with a mask and
# without (measured on an H200). A third and a fourth computing warpgroup fill the time in which
# others wait for their exponentials, but a tile of more rows leaves more of them empty.
_WIDE_64 = PrefillTile(64, 64, 128, 3, 3, rows=192)
_TALL_64 = PrefillTile(64, 64, 64, 2, 4, turns=False, rows=256)
_Costs = tuple[float, float, float]
_Choice = tuple[PrefillTile, _Costs, _Costs]
_OTHERS: dict[tuple[int, bool], tuple[_Choice, ...]] = {
    (64, False): (
        (_WIDE_64, (0.96, 0.86, 0.81), (0.82, 0.80, 0.73)),
        (_TALL_64, (0.91, 0.84, 0.82), (0.80, 0.80, 0.77)),
    ),
    (64, True): ((PrefillTile(64, 64, 96, 3, 3, rows=192), (1, 1, 0.93), (1, 1, 0.93)),),
    (96, False): ((PrefillTile(96, 96, 96, 2, 2, rows=192), (1, 1, 0.97), (1, 1, 0.97)),),
    (128, True): ((PrefillTile(128, 128, 64, 2, 3, rows=192), (1, 1, 0.97), (1, 1, 0.97)),),
    (256, False): ((PrefillTile(256, 256, 64, 1, 2), (0.93, 1, 1), (0.95, 1, 1)),),
}


def prefill_variants(arch: str) -> Iterator[Variant]:
    """All that the Hopper prefill kernel can be asked for."""
    if arch == "sm_90":
        for kind in (FP16, BF16):
            for score_mod in (False, True):
                for tile in _MOD_TILES if score_mod else _TILES:
                    yield tile.variant(kind, score_mod)
                for (_, modified), others in _OTHERS.items():
                    if modified == score_mod:
                        yield from (tile.variant(kind, score_mod) for tile, *_ in others)
        yield from fp8_variants(FP8_PREFILL_PARAMS.nbytes)


def prefill_fp8_cache_variants() -> Iterator[Variant]:
    """Those of 16-bit queries over 8-bit caches."""
    yield from widen_variants(PREFILL_PARAMS.nbytes)


def prefill_ones_variants() -> Iterator[Variant]:
    """Those of 8-bit queries without a log-sum-exp."""
    yield from fp8_variants(FP8_PREFILL_PARAMS.nbytes, ones=True)


def prefill_tile(problem: AttentionProblem) -> AnyTile:
    """Of the narrowest bucket, the tile whose rows, those that stay empty too, cost the least."""
    if problem.kv_type.is_fp8:
        return fp8_tile(problem) if problem.q_type.is_fp8 else widen_tile(problem)
    left, right = problem.window_left, problem.window_right
    seen = problem.max_seqlen_k if left < 0 else min(problem.max_seqlen_k, left + max(right, 0))
    # Batch-invariant calls always have the same one.
    size = len(_KEYS) if problem.batch_invariant else sum(seen > limit for limit in _KEYS)
    rows = problem.max_seqlen_q * gcd(problem.group_size, 64)

    def cost(choice: _Choice) -> float:
        tile, masked, unmasked = choice
        filled = 1 if problem.batch_invariant else -(-rows // tile.rows) * tile.rows
        return filled * (unmasked if left < 0 and right < 0 else masked)[size]

    return min(_choices(problem), key=cost)[0]


def prefill_tiles(problem: AttentionProblem) -> tuple[AnyTile, ...]:
    """All that calls within a problem's bounds may have."""
    if problem.kv_type.is_fp8:
        return (prefill_tile(problem),)
    return tuple(tile for tile, *_ in _choices(problem))


def prefill_variant(problem: AttentionProblem, tile: AnyTile) -> Variant:
    """The kernel of a problem that is not refused."""
    score_mod = has_score_mod(problem)
    if isinstance(tile, Fp8Tile):
        return tile.variant(FP8_PREFILL_PARAMS.nbytes, score_mod)
    if isinstance(tile, WidenTile):
        return tile.variant(problem.q_type, problem.kv_type, PREFILL_PARAMS.nbytes, score_mod)
    return tile.variant(problem.kv_type, score_mod)


def _choices(problem: AttentionProblem) -> tuple[_Choice, ...]:
    score_mod = has_score_mod(problem)
    found = next(
        tile
        for tile in (_MOD_TILES if score_mod else _TILES)
        if problem.head_dim <= tile.head_dim and problem.head_dim_v <= tile.head_dim_v
    )
    same = found.head_dim == found.head_dim_v
    others = _OTHERS.get((found.head_dim, score_mod), ()) if same else ()
    return ((found, (1, 1, 1), (1, 1, 1)), *others)


def has_score_mod(problem: AttentionProblem) -> bool:
    """Whether scores are modified: by a soft cap or ALiBi."""
    return problem.softcap > 0 or problem.has_alibi
