"""The tiles that portable attention is compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .attention_params import ATTENTION_PARAMS
from .compile import native_arch
from .decode_tile import DECODE_PARAMS, schedule_variant
from .device import DeviceInfo
from .dtypes import BF16, E4M3, E5M2, FP16, ScalarType
from .problem import AttentionProblem
from .variant import Variant

__all__ = ["STATIC_BYTES", "Tile", "attention_variants", "combine_variant", "score_mod", "tiles_of"]

_BUCKETS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_CACHES = ((FP16, FP16), (BF16, BF16), (FP16, E4M3), (FP16, E5M2))
_ROOMY = 128 << 10  # bytes of shared memory for a block; 8.6, 8.9 and 12.x have fewer
_HALF_ROOMY = ("sm_80", "sm_87")  # 163 KB
_CRAMPED = ("sm_86", "sm_89", "sm_120", "sm_121")
STATIC_BYTES = 256
"""Of shared memory that a kernel takes besides its tiles, at most."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What is compiled: types, head bucket and tile shape.

    Attributes
    ----------
    compute, cache : ScalarType
        Of the products, and of stored keys.
    head_dim, head_dim_v : int
        The bucket.
    row_tiles : int
        Of 16 rows, a warp.
    key_warps : int
        Warps that share rows and split the keys of a tile.
    warps, keys, stages : int
        Of a block; keys of a tile; tiles in shared memory.
    step : int
        Keys of a tile that a warp takes at a time.
    blocks : int
        That share a multiprocessor: what registers are limited for.
    hold : int
        Registers up to which queries stay in them, counting sums, scores and queries.
    """

    compute: ScalarType
    cache: ScalarType
    head_dim: int
    head_dim_v: int
    row_tiles: int
    key_warps: int
    warps: int
    keys: int
    step: int
    stages: int
    blocks: int
    hold: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps // self.key_warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """As mainloop/fwd_sm80.cuh lays it out: queries, stages, what copies need, row infos."""
        stage = self.keys * (self.head_dim + self.head_dim_v) * self.cache.itemsize
        places = 16 if self.head_dim <= 128 else 0
        rest = self.keys * 32 + self.threads * (places + 4 * max(1, self.stages - 1))
        return self.rows * (self.head_dim * 2 + 12) + self.stages * stage + rest

    def variant(self, arch: str, score_mod: bool) -> Variant:
        shape = f"d{self.head_dim}" + (
            "" if self.head_dim == self.head_dim_v else f"_{self.head_dim_v}"
        )
        decodes = self.key_warps > 1
        kind, rows = ("decode", "") if decodes else ("fwd", f"_m{self.rows}")
        name = f"attention_{kind}_sm80_{self.compute.name}_{self.cache.name}_{shape}{rows}"
        return Variant(
            f"attention_{kind}_sm80.cu",
            name + ("_mod" if score_mod else ""),
            arch,
            (
                ("BLOCKS", self.blocks),
                ("COMPUTE_TYPE", self.compute.code),
                *((("DECODE_NBYTES", DECODE_PARAMS.nbytes),) if decodes else ()),
                ("HEAD_DIM", self.head_dim),
                ("HEAD_DIM_V", self.head_dim_v),
                ("HOLD", self.hold),
                ("KEY_STEP", self.step),
                ("KEY_TILE", self.keys),
                ("KEY_WARPS", self.key_warps),
                ("KV_TYPE", self.cache.code),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("ROW_TILES", self.row_tiles),
                ("SCORE_MOD", int(score_mod)),
                ("SMEM_NBYTES", self.smem_bytes),
                ("STAGES", self.stages),
                ("WARPS", self.warps),
            ),
        )


def _step(arch: str, cache: ScalarType, head_dim: int, modified: bool) -> int:
    """Keys at a time, as far as registers reach: those of 9.0 hold one step more."""
    if head_dim == 128 and (cache.is_fp8 or modified or arch != "sm_90"):
        return 32
    return 64


def _tiles(
    arch: str,
    roomy: bool,
    compute: ScalarType,
    cache: ScalarType,
    bucket: tuple[int, int],
    modified: bool,
) -> dict[str, Tile]:
    """The tiles of a head bucket by kind; ``modified`` if scores are.

    Narrow and wide tiles take the same keys at a time, so a row has the same bits in either.
    """

    def tile(*shape: int) -> Tile:
        return Tile(compute, cache, *bucket, *shape)

    head_dim, step = bucket[0], _step(arch, cache, bucket[0], modified)
    if head_dim > 128:
        spills = cache.is_fp8 and modified and arch.startswith("sm_8")  # with 64 keys
        wide = roomy and not spills
        return {
            "narrow": tile(1, 1, 4, 64, 64, 1, 2, 0) if wide else tile(1, 1, 4, 32, 32, 2, 2, 0)
        }
    keys = 128 if head_dim <= 64 and roomy else 64
    return {
        "decode": tile(1, 4, 4, *_decode_shape(arch, roomy, cache, head_dim)),
        "narrow": tile(1, 1, 4, 64, step, 2, 2, 160),
        "wide": tile(2, 1, 4, keys, step, 2, 2, 160 if head_dim <= 64 else 128),
    }


def _decode_shape(
    arch: str, roomy: bool, cache: ScalarType, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Keys of a tile and of a step, stages, blocks and hold of a tile for decoding."""
    large = roomy and arch not in _HALF_ROOMY
    if cache.is_fp8:
        return (128, 32, 2, 3, 128) if large and head_dim == 128 else (64, 16, 3, 4, 0)
    if head_dim <= 64 and roomy:
        return (128, 32, 2, 3, 128) if large else (64, 16, 4, 3, 128)
    return (64, 16, 3, 2, 128) if large and head_dim == 128 else (64, 16, 2, 3, 128)


def tiles_of(problem: AttentionProblem, info: DeviceInfo) -> dict[str, Tile]:
    """The tiles that serve a problem on a device, by kind.

    ``decode`` (at most 16 rows) and ``wide`` (of 128) are not there for every head size and every
    device; ``narrow`` (of 64) is.
    """
    cache = problem.kv_type
    bucket = next(b for b in _BUCKETS if problem.head_dim <= b[0] and problem.head_dim_v <= b[1])
    room = info.smem_optin - STATIC_BYTES
    compute = FP16 if cache.is_fp8 else cache
    arch, roomy = native_arch(info.capability), info.smem_optin >= _ROOMY
    tiles = _tiles(arch, roomy, compute, cache, bucket, score_mod(problem))
    return {kind: tile for kind, tile in tiles.items() if tile.smem_bytes <= room}


def score_mod(problem: AttentionProblem) -> bool:
    """Whether scores change between product and softmax."""
    return problem.softcap > 0 or problem.has_alibi


def combine_variant(arch: str) -> Variant:
    """The kernel that merges the pieces of split keys."""
    return Variant(
        "attention_combine.cu",
        "attention_combine",
        arch,
        (("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),),
    )


def attention_variants(arch: str) -> Iterator[Variant]:
    """All that the portable family can ask for."""
    roomy = arch not in _CRAMPED
    for compute, cache in _CACHES:
        for bucket in _BUCKETS:
            for modified in (False, True):
                for tile in _tiles(arch, roomy, compute, cache, bucket, modified).values():
                    yield tile.variant(arch, modified)
    yield combine_variant(arch)
    if arch != "sm_90":  # there it is the Hopper kernels'
        yield schedule_variant((int(arch[3:-1]), int(arch[-1])))
