"""The launch of ``merge_attn_states``."""

from __future__ import annotations

from collections.abc import Iterator

from .dtypes import BF16, E4M3, FP16, FP32
from .params import ParamsLayout
from .row_kernel import RowKernel
from .variant import Variant

__all__ = ["MERGE", "MERGE_PARAMS", "make_merge_plan", "merge_variant", "merge_variants"]

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

MERGE = RowKernel(
    source="merge_attn_states.cu",
    params=MERGE_PARAMS,
    threads=128,
    thread_tokens=4,
    thread_accesses=1,
    tile_tokens=8,  # of a head are one 32-byte sector of the lse arrays
    sides=1,
)
merge_variant, make_merge_plan = MERGE.variant, MERGE.plan


def merge_variants(arch: str) -> Iterator[Variant]:
    """All that `cupyflash.merge_attn_states` can ask for."""
    for in_type in (FP32, FP16, BF16):
        for out_type in (in_type, E4M3):
            yield merge_variant(arch, in_type, out_type)
