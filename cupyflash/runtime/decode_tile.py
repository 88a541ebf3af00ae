"""What is compiled of the Hopper decode kernel, and the layout of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .attention_params import ATTENTION_PARAMS
from .compile import native_arch
from .dtypes import BF16, E4M3, E5M2, FP16, ScalarType
from .params import ParamsLayout
from .variant import Variant

__all__ = [
    "BUCKETS",
    "DECODE_PARAMS",
    "DecodeTile",
    "decode_variants",
    "row_tiles",
    "schedule_variant",
    "shared_ring_tiles",
    "warp_counts",
]

DECODE_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("partial_out", "partial_state", "arrivals", "prefix", "mail")),
    *(
        (name, "i32")
        for name in (
            *("spans", "tile_shift", "row_block", "units", "unit_shift", "fewest_shift"),
            *("align_most", "most_pieces", "chunks", "counters", "most_rows", "segment_tiles"),
            "stages",
            *("box_shift", "k_panels", "v_panels", "whole_boxes", "column_shift", "page_shift"),
        )
    ),
    ("group_inverse", "u32"),
    ("even_pieces", "i32"),
    ("even_inverse", "u32"),
    ("unit_inverse", "u32"),
    *((name, "i32") for name in ("even_least", "even_most")),
    ("table_bytes", "i32"),
    ("out_wide", "i32"),
    *((name, "f32") for name in ("tile_time", "tile_floor", "pair_time")),
)
"""The layout of ``core/decode_params.cuh``."""

BUCKETS = (64, 128, 256)
"""Head sizes that are compiled: at least those of k and v."""

_ARCH = "sm_90a"
_CACHES = ((FP16, FP16), (BF16, BF16), (FP16, E4M3), (FP16, E5M2))


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """What is compiled: types of products and cache, head bucket, rows of a segment, warps.

    ``plain``: for calls that block/decode_plain.cuh describes alone. ``shared_rings``: warps of
    heads side by side share their tiles.
    """

    compute: ScalarType
    cache: ScalarType
    head_dim: int
    rows: int
    warps: int = 4
    plain: bool = False
    shared_rings: bool = False

    @property
    def keys(self) -> int:
        """Of a warp's tile: 4 KiB a side where rows allow."""
        narrow = self.head_dim * self.cache.itemsize <= 128
        return 32 if narrow else 16

    @property
    def panels(self) -> int:
        return -(-self.head_dim * self.cache.itemsize // 128)

    @property
    def whole_panels(self) -> bool:
        """Whether a row of keys is whole panels of 128 bytes."""
        return self.head_dim * self.cache.itemsize % 128 == 0

    @property
    def stage_bytes(self) -> int:
        return 2 * self.keys * self.panels * 128

    @property
    def variant(self) -> Variant:
        return Variant(
            "attention_decode_sm90.cu",
            f"attention_decode_sm90_{self.compute.name}_{self.cache.name}_d{self.head_dim}"
            f"_r{self.rows}"
            + (f"_w{self.warps}" if self.warps > 4 else "")
            + ("_plain" if self.plain else "")
            + ("_shared" if self.shared_rings else ""),
            _ARCH,
            (
                ("COMPUTE_TYPE", self.compute.code),
                ("DECODE_NBYTES", DECODE_PARAMS.nbytes),
                ("DECODE_PLAIN", int(self.plain)),
                ("DECODE_ROWS", self.rows),
                ("DECODE_SHARED_RINGS", int(self.shared_rings)),
                ("DECODE_WARPS", self.warps),
                ("HEAD_DIM", self.head_dim),
                ("KEY_TILE", self.keys),
                ("KV_TYPE", self.cache.code),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
            ),
        )


def row_tiles(head_dim: int) -> tuple[int, ...]:
    """Rows of a segment that there are: as far as registers reach."""
    return (8,) if head_dim > 128 else (8, 16)


def warp_counts(head_dim: int) -> tuple[int, ...]:
    """Warps of a block that there are: two blocks of 4 on a multiprocessor, or one of either."""
    return (4,) if head_dim > 128 else (4, 8)


def decode_variants(arch: str) -> Iterator[Variant]:
    """All that the Hopper decode kernel can be asked for."""
    if arch != "sm_90":
        return
    for compute, cache in _CACHES:
        for head_dim in BUCKETS:
            for rows in row_tiles(head_dim):
                for warps in warp_counts(head_dim):
                    tile = DecodeTile(compute, cache, head_dim, rows, warps)
                    yield tile.variant
                    if tile.whole_panels:
                        yield replace(tile, plain=True).variant
    yield from (tile.variant for tile in shared_ring_tiles())
    yield schedule_variant((9, 0))


@lru_cache(maxsize=1)
def shared_ring_tiles() -> tuple[DecodeTile, ...]:
    """Those of rows of 128 bytes, two heads a box; and of rows of 256 bytes, eight."""
    found = [DecodeTile(FP16, kv, 128, 8, 4, True, True) for kv in (E4M3, E5M2)]
    for kv in (FP16, BF16):
        found += [DecodeTile(kv, kv, 64, 8, 4, True, True)]
        found += [DecodeTile(kv, kv, 128, 8, 8, True, True)]
    return tuple(found)


def schedule_variant(capability: tuple[int, int]) -> Variant:
    """The kernel that adds up large batches."""
    arch = _ARCH if capability == (9, 0) else native_arch(capability)
    return Variant("schedule.cu", "schedule", arch, (("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),))
