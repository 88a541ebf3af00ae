"""The launch of ``reshape_and_cache_flash``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .dtypes import BF16, E4M3, E5M2, FP16, FP32, ScalarType
from .params import ParamsLayout
from .plan import Plan
from .tiles import row_block, row_steps
from .variant import Variant

__all__ = ["WRITE_PARAMS", "make_write_plan", "write_variant", "write_variants"]

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

_THREADS = 128
_THREAD_TOKENS = 2
_THREAD_ACCESSES = 4


def write_variant(arch: str, in_type: ScalarType, cache_type: ScalarType) -> Variant:
    return Variant(
        "reshape_and_cache.cu",
        f"reshape_and_cache_{in_type.name}_{cache_type.name}",
        arch,
        (
            ("IN_TYPE", in_type.code),
            ("OUT_TYPE", cache_type.code),
            ("PARAMS_NBYTES", WRITE_PARAMS.nbytes),
        ),
    )


def write_variants(arch: str) -> Iterator[Variant]:
    """All that `cupyflash.reshape_and_cache_flash` can ask for."""
    yield write_variant(arch, FP32, FP32)
    for in_type in (FP32, FP16, BF16):
        for cache_type in (FP16, BF16, E4M3, E5M2):
            yield write_variant(arch, in_type, cache_type)


@lru_cache(maxsize=1024)
def make_write_plan(
    arch: str,
    in_type: ScalarType,
    cache_type: ScalarType,
    tokens: int,
    heads: int,
    head_dim: int,
    vectorised: bool,
) -> Plan:
    """Grid ``(token tiles, head tiles, key and value)``; ``head_dim`` is the larger of both."""
    variant = write_variant(arch, in_type, cache_type)
    if not tokens * heads * head_dim:
        return Plan(variant, (0, 1, 1), (1, 1, 1))
    (tiles, head_tiles), block = row_block(
        _THREADS,
        tokens,
        heads,
        -(-row_steps(head_dim, in_type.itemsize, vectorised) // _THREAD_ACCESSES),
        thread_tokens=_THREAD_TOKENS,
        tile_tokens=1,
    )
    return Plan(variant, (tiles, head_tiles, 2), block)
