"""The launch of ``merge_attn_states``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .dtypes import BF16, E4M3, FP16, FP32, ScalarType
from .params import ParamsLayout
from .plan import Plan
from .tiles import row_block, row_steps
from .variant import Variant

__all__ = ["MERGE_PARAMS", "make_merge_plan", "merge_variant", "merge_variants"]

MERGE_PARAMS = ParamsLayout(
    ("out", "ptr"),
    ("prefix_out", "ptr"),
    ("prefix_lse", "ptr"),
    ("suffix_out", "ptr"),
    ("suffix_lse", "ptr"),
    ("out_lse", "ptr"),
    ("sink", "ptr"),
    ("out_scale", "ptr"),
    ("prefix_tokens", "i32"),
    ("out_scale_value", "f32"),
    ("out_token_stride", "i64"),
    ("out_head_stride", "i64"),
    ("prefix_token_stride", "i64"),
    ("prefix_head_stride", "i64"),
    ("prefix_lse_head_stride", "i64"),
    ("prefix_lse_token_stride", "i64"),
    ("suffix_token_stride", "i64"),
    ("suffix_head_stride", "i64"),
    ("suffix_lse_head_stride", "i64"),
    ("suffix_lse_token_stride", "i64"),
    ("out_lse_head_stride", "i64"),
    ("out_lse_token_stride", "i64"),
    ("tokens", "i32"),
    ("heads", "i32"),
    ("head_dim", "i32"),
    ("sink_type", "i32"),
    ("vectorised", "i32"),
    ("unused", "i32"),
)

# Eight tokens of a head are one 32-byte sector of the lse arrays.
_TILE_TOKENS = 8
_THREADS = 256
_THREAD_TOKENS = 4


def merge_variant(arch: str, in_type: ScalarType, out_type: ScalarType) -> Variant:
    return Variant(
        "merge_attn_states.cu",
        f"merge_attn_states_{in_type.name}_{out_type.name}",
        arch,
        (
            ("IN_TYPE", in_type.code),
            ("OUT_TYPE", out_type.code),
            ("PARAMS_NBYTES", MERGE_PARAMS.nbytes),
        ),
    )


def merge_variants(arch: str) -> Iterator[Variant]:
    """All that `cupyflash.merge_attn_states` can ask for."""
    for in_type in (FP32, FP16, BF16):
        for out_type in (in_type, E4M3):
            yield merge_variant(arch, in_type, out_type)


@lru_cache(maxsize=1024)
def make_merge_plan(
    arch: str,
    in_type: ScalarType,
    out_type: ScalarType,
    tokens: int,
    heads: int,
    head_dim: int,
    vectorised: bool,
) -> Plan:
    """Grid ``(token tiles, head tiles)``; empty where there is nothing to merge."""
    variant = merge_variant(arch, in_type, out_type)
    if not tokens * heads * head_dim:
        return Plan(variant, (0, 1, 1), (1, 1, 1))
    (tiles, head_tiles), block = row_block(
        _THREADS,
        tokens,
        heads,
        row_steps(head_dim, in_type.itemsize, vectorised),
        thread_tokens=_THREAD_TOKENS,
        tile_tokens=_TILE_TOKENS,
    )
    return Plan(variant, (tiles, head_tiles, 1), block)
