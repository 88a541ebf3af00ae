"""The launch of ``reshape_and_cache_flash``."""

from __future__ import annotations

from collections.abc import Iterator

from .dtypes import BF16, E4M3, E5M2, FP16, FP32
from .params import ParamsLayout
from .row_kernel import RowKernel
from .variant import Variant

__all__ = ["WRITE", "WRITE_PARAMS", "make_write_plan", "write_variant", "write_variants"]

_SIDE = (
    "source_token_stride",
    "source_head_stride",
    "block_stride",
    "slot_stride",
    "head_stride",
    "scale_stride",
)
_SIDES = ("key", "value")

WRITE_PARAMS = ParamsLayout(
    *((f"{side}_source", "ptr") for side in _SIDES),
    *((f"{side}_cache", "ptr") for side in _SIDES),
    ("slots", "ptr"),
    *((f"{side}_scale", "ptr") for side in _SIDES),
    *((f"{side}_scale_value", "f32") for side in _SIDES),
    *((f"{side}_{name}", "i64") for side in _SIDES for name in _SIDE),
    ("num_slots", "i64"),
    ("block_inverse", "u64"),
    ("num_tokens", "i32"),
    ("heads", "i32"),
    *((f"{side}_head_dim", "i32") for side in _SIDES),
    ("block_size", "i32"),
    ("wide_slots", "i32"),
    ("vectorised", "i32"),
    ("unused", "i32"),
)

WRITE = RowKernel(
    source="reshape_and_cache.cu",
    params=WRITE_PARAMS,
    threads=128,
    thread_tokens=1,
    thread_accesses=2,
    tile_tokens=1,
    sides=len(_SIDES),
)
write_variant, make_write_plan = WRITE.variant, WRITE.plan


def write_variants(arch: str) -> Iterator[Variant]:
    """All that `cupyflash.reshape_and_cache_flash` can ask for."""
    yield write_variant(arch, FP32, FP32)
    for in_type in (FP32, FP16, BF16):
        for cache_type in (FP16, BF16, E4M3, E5M2):
            yield write_variant(arch, in_type, cache_type)
