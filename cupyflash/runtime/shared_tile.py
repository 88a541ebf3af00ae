"""What is compiled of the kernels of shared prefixes, and the layout of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .attention_params import ATTENTION_PARAMS
from .decode_tile import DECODE_PARAMS
from .dtypes import BF16, E4M3, E5M2, FP16, ScalarType
from .params import ParamsLayout
from .prefix_search import PREFIX_PARAMS
from .variant import Variant

__all__ = [
    "MOST_LEVELS",
    "ROW_BYTES",
    "SCRATCH_BYTES",
    "SHARED_PARAMS",
    "SHARE_ROWS",
    "START_BYTES",
    "SharedTile",
    "schedule_shared_variant",
    "shared_fp8_variants",
    "shared_variants",
]

SHARED_PARAMS = ParamsLayout(
    *(
        (name, "ptr")
        for name in (
            *("order", "tree", "own", "own_starts", "groups", "group_starts", "tokens", "rows"),
            *("partial_out", "partial_state", "arrivals"),
        )
    ),
    *(
        (name, "i32")
        for name in (
            *("levels", "common_keys", "added_keys", "box_shift", "tile_rows", "most_tokens"),
            *("row_blocks", "ahead", "near", "ctas"),
        )
    ),
    ("scale", "f32"),
    ("modify_scale", "f32"),
)
"""The layout of ``core/shared_params.cuh``."""

MOST_LEVELS = 3
SHARE_ROWS = 128
"""Rows of a block of shared keys: two warpgroups."""

ROW_BYTES = 64
"""Of a ``MergeRow``."""

SCRATCH_BYTES = 126_976
"""Shared memory of the schedule: a ``ScheduleScratch``."""

SEARCHED_SCRATCH_BYTES = 65_536
"""That of 512 requests."""

START_BYTES = 64
"""Of what a block starts from."""

_ARCH = "sm_90a"
_BUCKETS = {64: (8, 16), 128: (8,)}  # head sizes, and rows of a request as far as registers reach
_SHARE_KEYS, _OWN_WARPS = 64, 4
_OWN_STAGE_BYTES = 8192
# Of a thread that multiplies shared keys, that takes own ones, that loads: by rows of a request; of
# 8-bit caches, where those that load widen too, by head size and rows.
_REGISTERS = {8: (168, 152, 24), 16: (152, 184, 24)}
_REGISTERS_FP8 = {(128, 8): (160, 152, 40), (64, 8): (152, 160, 48), (64, 16): (144, 176, 48)}


@dataclass(frozen=True, slots=True)
class SharedTile:
    """What is compiled.

    Attributes
    ----------
    compute : ScalarType
        Of queries and of all products.
    cache : ScalarType
    head_dim : int
        A bucket.
    rows : int
        Of a request that read own keys together.
    parts : bool
        Whether a warp merges a part of a row at a time, not a row.
    inside : bool
        Whether it can make its schedule by itself. Without that it is smaller, and starts sooner.
    alibi : bool
    """

    compute: ScalarType
    cache: ScalarType
    head_dim: int
    rows: int
    parts: bool = False
    inside: bool = True
    alibi: bool = False

    @property
    def panels(self) -> int:
        """Of 128 bytes of a key."""
        return -(-self.head_dim * self.cache.itemsize // 128)

    @property
    def whole_panels(self) -> bool:
        return self.head_dim * self.cache.itemsize % 128 == 0

    @property
    def keys(self) -> int:
        """Of a tile of own keys: 4 KiB a side."""
        return 32 // self.panels

    @property
    def stages(self) -> tuple[int, int, int]:
        """Blocks of shared keys that are multiplied; tiles of own keys, a warp; 8-bit blocks."""
        if self.cache.is_fp8:
            return (3, 2, 2) if self.head_dim == 128 else (3, 4, 2)
        return (4, 2, 0) if self.head_dim == 128 else (5, 4, 0)

    @property
    def smem_bytes(self) -> int:
        shared, own, raw = self.stages
        queries = SHARE_ROWS * self.head_dim * 2
        blocks = 2 * _SHARE_KEYS * (shared * self.head_dim * 2 + raw * 128)
        rings = _OWN_WARPS * own * _OWN_STAGE_BYTES
        barriers = -(-(4 * shared + _OWN_WARPS * own + 6) // 2) * 16
        starts = _OWN_WARPS * 64 + START_BYTES  # where warps start
        widened = raw * 32 + SHARE_ROWS * 8 if raw else 0  # barriers, and scales of rows
        return queries + blocks + rings + barriers + 16 + starts + widened

    @property
    def variant(self) -> Variant:
        shared, own, raw = self.stages
        wide = _REGISTERS[self.rows]
        tile, single, load = _REGISTERS_FP8[self.head_dim, self.rows] if raw else wide
        name = self.cache.name if self.cache == self.compute else f"fp16_{self.cache.name}"
        return Variant(
            "attention_shared_sm90.cu",
            f"attention_shared_sm90_{name}_d{self.head_dim}_r{self.rows}"
            f"{'_parts' * self.parts}{'_alibi' * self.alibi}{'_ahead' * (not self.inside)}",
            _ARCH,
            (
                ("COMPUTE_TYPE", self.compute.code),
                ("DECODE_NBYTES", DECODE_PARAMS.nbytes),
                ("HEAD_DIM", self.head_dim),
                ("KEY_STAGES", shared),
                ("KEY_TILE", self.keys),
                ("KV_TYPE", self.cache.code),
                ("LOAD_REGISTERS", load),
                ("OWN_REGISTERS", single),
                ("OWN_STAGES", own),
                ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
                ("RAW_STAGES", raw),
                ("SHARED_ALIBI", int(self.alibi)),
                ("SHARED_INSIDE", int(self.inside)),
                ("SHARED_MERGE_PARTS", int(self.parts)),
                ("SHARED_NBYTES", SHARED_PARAMS.nbytes),
                ("SHARED_ROWS", self.rows),
                ("TILE_REGISTERS", tile),
            ),
        )


def shared_variants(arch: str) -> Iterator[Variant]:
    """All that shared prefixes can be asked for."""
    if arch != "sm_90":
        return
    for compute in (FP16, BF16):
        yield from _variants(compute, compute)
    yield schedule_shared_variant()


def shared_fp8_variants() -> Iterator[Variant]:
    """Those of 8-bit caches."""
    for cache in (E4M3, E5M2):
        yield from _variants(FP16, cache)


def _variants(compute: ScalarType, cache: ScalarType) -> Iterator[Variant]:
    for head_dim, rows in _BUCKETS.items():
        for most in rows:
            for parts, inside in product((False, True), repeat=2):
                yield SharedTile(compute, cache, head_dim, most, parts, inside).variant
            yield SharedTile(compute, cache, head_dim, most, alibi=True).variant


def schedule_shared_variant() -> Variant:
    """The kernel that finds out what is shared."""
    return Variant(
        "schedule_shared.cu",
        "schedule_shared",
        _ARCH,
        (
            ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
            ("SCRATCH_NBYTES", SCRATCH_BYTES),
            ("SHARED_NBYTES", SHARED_PARAMS.nbytes),
        ),
    )


def share_prefixes_variant() -> Variant:
    """The kernel that compares block tables, and makes the schedule of what it finds."""
    return Variant(
        "share_prefixes.cu",
        "share_prefixes",
        _ARCH,
        (
            ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
            ("SCRATCH_NBYTES", SEARCHED_SCRATCH_BYTES),
            ("SEARCH_NBYTES", PREFIX_PARAMS.nbytes),
            ("SHARED_NBYTES", SHARED_PARAMS.nbytes),
        ),
    )
