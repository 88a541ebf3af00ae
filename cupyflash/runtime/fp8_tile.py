"""What is compiled of the Hopper prefill with q, k and v in e4m3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .attention_params import ATTENTION_PARAMS
from .dtypes import BF16, E4M3, FP16
from .problem import AttentionProblem
from .variant import Variant

__all__ = ["Fp8Tile", "fp8_refusal", "fp8_tile", "fp8_variants"]

_ARCH = "sm_90a"
# Of a thread that loads and one that computes, by the rows of a tile.
_REGISTERS = {128: (40, 232), 192: (32, 160)}
_PANEL = 128  # bytes of a row that lie together in shared memory
_ALIGNMENT = 1024
_REST_BYTES = 2048  # of shared memory besides the tiles: Fp8Shared::Rest
_ONES = 8  # columns, the least that a product takes more
_STEP = 16  # of head sizes: rows of TMA start at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """What is compiled for a head bucket.

    Attributes
    ----------
    head_dim : int
        Of q, k and v, at most.
    keys : int
        Of a tile.
    query_stages, key_stages, value_stages, turned_stages : int
        Buffers of queries, keys, values as they are stored, and transposed values.
    columns : int
        Of the output at a time, one thing after the other; 0 = all, beside the next scores.
    rows : int
        Of queries: 64 a computing warpgroup.
    sum_column : bool
        Sums of weights are products with a column of ones: of the rounded weights. The output is
        the better for it, a log-sum-exp is not.
    """

    head_dim: int
    keys: int
    query_stages: int = 2
    key_stages: int = 3
    value_stages: int = 2
    turned_stages: int = 2
    columns: int = 0
    rows: int = 128
    sum_column: bool = False

    @property
    def threads(self) -> int:
        return 128 + 2 * self.rows

    @property
    def smem_bytes(self) -> int:
        row = -(-self.head_dim // _PANEL) * _PANEL
        loaded = self.keys * (self.key_stages + self.value_stages)
        tiles = (self.query_stages * self.rows + loaded) * row
        turned = self.turned_stages * self.keys * (self.head_dim + _ONES * self.sum_column)
        return _ALIGNMENT + tiles + turned + _REST_BYTES

    def variant(self, params_nbytes: int, score_mod: bool) -> Variant:
        rows = "" if self.rows == 128 else f"_m{self.rows}"
        ones = "_ones" if self.sum_column else ""
        name = f"attention_fwd_sm90_fp8_d{self.head_dim}_n{self.keys}{rows}{ones}"
        load_registers, compute_registers = _REGISTERS[self.rows]
        return Variant(
            "attention_fwd_sm90_fp8.cu",
            name + ("_mod" if score_mod else ""),
            _ARCH,
            (
                ("COLUMNS", self.columns),
                ("COMPUTE_REGISTERS", compute_registers),
                ("FP8_PREFILL_NBYTES", params_nbytes),
                ("HEAD_DIM", self.head_dim),
                ("KEY_STAGES", self.key_stages),
                ("KEY_TILE", self.keys),
                ("LOAD_REGISTERS", load_registers),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("QUERY_STAGES", self.query_stages),
                ("SCORE_MOD", int(score_mod)),
                ("SMEM_NBYTES", self.smem_bytes),
                ("SUM_COLUMN", int(self.sum_column)),
                ("TILE_ROWS", self.rows),
                ("TURNED_STAGES", self.turned_stages),
                ("VALUE_STAGES", self.value_stages),
            ),
        )


_TILES = (
    Fp8Tile(64, 128),
    Fp8Tile(128, 128),
    Fp8Tile(256, 128, query_stages=1, key_stages=2, columns=64),
)
# More rows than keys: where keys are masked, a third of the rows may see nothing of a key tile.
_TALL = Fp8Tile(64, 128, rows=192)
# Modified scores take registers.
_MOD_TILES = (Fp8Tile(64, 128), Fp8Tile(128, 128), Fp8Tile(256, 64, key_stages=2, columns=64))


def fp8_variants(params_nbytes: int, ones: bool = False) -> Iterator[Variant]:
    """All that the 8-bit Hopper prefill can be asked for, with a column of ones or without."""
    for score_mod in (False, True):
        for tile in _MOD_TILES if score_mod else (*_TILES, _TALL):
            found = _without_lse(tile) if ones else tile
            if found.sum_column == ones:
                yield found.variant(params_nbytes, score_mod)


def fp8_tile(problem: AttentionProblem) -> Fp8Tile:
    """The narrowest bucket of a problem that is not refused."""
    largest = max(problem.head_dim, problem.head_dim_v)
    modified = problem.softcap > 0 or problem.has_alibi
    if largest <= _TALL.head_dim and problem.window_right < 0 and not modified:
        return _TALL
    tiles = _MOD_TILES if modified else _TILES
    found = next(tile for tile in tiles if largest <= tile.head_dim)
    return found if problem.wants_lse else _without_lse(found)


def _without_lse(tile: Fp8Tile) -> Fp8Tile:
    """With a column of ones, if it may: it spills in 192 rows, and in parts sums bound weights."""
    return replace(tile, sum_column=tile is not _TALL and not tile.columns)


def fp8_refusal(problem: AttentionProblem) -> str:
    """Why the 8-bit prefill does not take a problem; empty where it does."""
    if {problem.q_type, problem.kv_type} != {E4M3} or problem.out_type not in (BF16, FP16):
        return "it takes q, k, v and out of one 16-bit type, or q, k and v in e4m3"
    largest = _TILES[-1].head_dim
    if max(problem.head_dim, problem.head_dim_v) > largest:
        return f"8-bit head sizes {problem.head_dim} and {problem.head_dim_v}: at most {largest}"
    if problem.head_dim % _STEP or problem.head_dim_v % _STEP:
        return f"8-bit head sizes {problem.head_dim} and {problem.head_dim_v}: multiples of {_STEP}"
    return ""
