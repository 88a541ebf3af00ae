"""What is compiled of the Hopper prefill with 16-bit queries over an 8-bit cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .attention_params import ATTENTION_PARAMS
from .dtypes import BF16, E4M3, E5M2, FP16, ScalarType
from .problem import AttentionProblem
from .variant import Variant

__all__ = ["WidenTile", "widen_refusal", "widen_tile", "widen_variants"]

_ARCH = "sm_90a"
_ALIGNMENT = 1024
_ROWS = 128
# Of a thread that loads, one that widens and one that computes, by whether that holds queries.
_REGISTERS = {False: (40, 56, 208), True: (32, 32, 224)}
_REST_BYTES = 2048  # of shared memory besides the tiles: PrefillShared::Rest, WidenShared::Raw


@dataclass(frozen=True, slots=True)
class WidenTile:
    """What is compiled for a head bucket.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Of q and k, and of v, at most.
    keys : int
        Of a tile.
    raw_rows, raw_stages : int
        Keys, or values, that come together as they are stored, and buffers of them.
    query_stages, stages : int
        Buffers of queries, and of keys and of values that are multiplied.
    held : bool
        Whether queries are kept in registers: products of keys read half as much of shared memory,
        which what is widened passes twice.
    rows : int
        Of queries.
    """

    head_dim: int
    head_dim_v: int
    keys: int
    raw_rows: int
    raw_stages: int
    query_stages: int = 1
    stages: int = 2
    held: bool = False
    rows: int = _ROWS

    @property
    def threads(self) -> int:
        return 256 + 2 * self.rows

    @property
    def smem_bytes(self) -> int:
        k, v = (-(-size // 64) * 128 for size in (self.head_dim, self.head_dim_v))
        raw = sum(-(-size // 128) * 128 for size in (self.head_dim, self.head_dim_v))
        stored = self.raw_stages * self.raw_rows * raw
        tiles = self.query_stages * self.rows * k + self.stages * self.keys * (k + v)
        return _ALIGNMENT + tiles + stored + _REST_BYTES

    def variant(
        self, kind: ScalarType, cache: ScalarType, params_nbytes: int, score_mod: bool
    ) -> Variant:
        same = self.head_dim == self.head_dim_v
        shape = f"d{self.head_dim}" + ("" if same else f"_{self.head_dim_v}")
        name = f"attention_fwd_sm90_{kind.name}_{cache.name}_{shape}_n{self.keys}"
        load, widen, compute = _REGISTERS[self.held]
        # Widening to fp16 takes a quarter of the instructions that it takes to bf16.
        products = FP16 if self.held and not score_mod else kind
        return Variant(
            "attention_fwd_sm90_widen.cu",
            name + ("_mod" if score_mod else ""),
            _ARCH,
            (
                ("COMPUTE_REGISTERS", compute),
                ("COMPUTE_TYPE", products.code),
                ("HEAD_DIM", self.head_dim),
                ("HEAD_DIM_V", self.head_dim_v),
                ("KEY_STAGES", self.stages),
                ("KEY_TILE", self.keys),
                ("KV_TYPE", cache.code),
                ("LOAD_REGISTERS", load),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("QUERIES_HELD", int(self.held)),
                ("QUERY_STAGES", self.query_stages),
                ("QUERY_TYPE", kind.code),
                ("RAW_ROWS", self.raw_rows),
                ("RAW_STAGES", self.raw_stages),
                ("SCORE_MOD", int(score_mod)),
                ("SMEM_NBYTES", self.smem_bytes),
                ("TILE_ROWS", self.rows),
                ("WIDEN_NBYTES", params_nbytes),
                ("WIDEN_REGISTERS", widen),
            ),
        )


_TILES = (
    WidenTile(64, 64, 128, 64, 4, query_stages=3, stages=3, held=True),
    WidenTile(128, 128, 128, 64, 2, query_stages=2, held=True),
    WidenTile(192, 128, 96, 48, 2),
    WidenTile(192, 192, 80, 16, 5),
    WidenTile(256, 256, 64, 32, 2),
)
# Modified scores take registers.
_MOD_TILES = (
    _TILES[0],
    WidenTile(128, 128, 96, 48, 2, query_stages=2, held=True),
    *_TILES[2:],
)


def widen_variants(params_nbytes: int) -> Iterator[Variant]:
    """All that this kernel can be asked for."""
    for kind in (FP16, BF16):
        for cache in (E4M3, E5M2):
            for score_mod in (False, True):
                for tile in _MOD_TILES if score_mod else _TILES:
                    yield tile.variant(kind, cache, params_nbytes, score_mod)


def widen_tile(problem: AttentionProblem) -> WidenTile:
    """The narrowest bucket of a problem that is not refused."""
    modified = problem.softcap > 0 or problem.has_alibi
    return next(
        tile
        for tile in (_MOD_TILES if modified else _TILES)
        if problem.head_dim <= tile.head_dim and problem.head_dim_v <= tile.head_dim_v
    )


def widen_refusal(problem: AttentionProblem) -> str:
    """Why this kernel does not take a problem; empty where it does."""
    if problem.q_type not in (BF16, FP16) or problem.out_type != problem.q_type:
        return "over an 8-bit cache it takes q and out of one 16-bit type"
    return ""
