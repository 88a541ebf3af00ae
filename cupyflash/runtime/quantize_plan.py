"""The launches of ``quantize_fp8``."""

from __future__ import annotations

from collections.abc import Iterator

from .dtypes import BF16, E4M3, E5M2, FP16, FP32, ScalarType
from .params import ParamsLayout
from .plan import Plan
from .variant import Variant

__all__ = ["QUANTIZE_PARAMS", "make_quantize_plans", "quantize_variants"]

QUANTIZE_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("source", "out", "scale", "made", "largest")),
    *(
        (f"{name}_stride", "i64")
        for name in ("source_token", "source_head", "out_token", "out_head", "scale")
    ),
    *((name, "i32") for name in ("tokens", "group_heads", "head_dim", "pieces", "vectorised")),
    ("rotated", "i32"),
    ("scale_value", "f32"),
    ("rotation", "f32"),
    ("unused", "i32"),
)
"""The layout of ``core/quantize_params.cuh``."""

_THREADS = 256
_WARPS = _THREADS // 32
_MOST_PIECES = 128
_MOST_BLOCKS = 4096


def _variant(arch: str, source: str, in_type: ScalarType, out_type: ScalarType) -> Variant:
    symbol = f"{source}_{in_type.name}_{out_type.name}"
    defines = (
        ("IN_TYPE", in_type.code),
        ("OUT_TYPE", out_type.code),
        ("PARAMS_NBYTES", QUANTIZE_PARAMS.nbytes),
    )
    return Variant(f"{source}.cu", symbol, arch, defines)


def quantize_variants(arch: str) -> Iterator[Variant]:
    """All that `cupyflash.quantize_fp8` can ask for."""
    for in_type in (FP32, FP16, BF16):
        yield _variant(arch, "fp8_scale", in_type, E4M3)
        for out_type in (E4M3, E5M2):
            yield _variant(arch, "quantize_fp8", in_type, out_type)


def make_quantize_plans(
    arch: str, in_type: ScalarType, out_type: ScalarType, rows: int, groups: int
) -> tuple[Plan, Plan]:
    """What finds the largest values and what converts.

    Parameters
    ----------
    rows : int
        (token, head) pairs of a group.
    groups : int

    Returns
    -------
    largest, convert : Plan
        ``largest.grid[0]`` float32 a group are handed on in the workspace.
    """
    blocks = -(-rows // _WARPS)
    pieces = max(1, min(_MOST_PIECES, -(-blocks // 4)))
    largest = Plan(
        _variant(arch, "fp8_scale", in_type, E4M3),
        (pieces, groups, 1),
        (_THREADS, 1, 1),
        workspace_bytes=4 * pieces * groups,
    )
    convert = Plan(
        _variant(arch, "quantize_fp8", in_type, out_type),
        (max(1, min(_MOST_BLOCKS, blocks)), groups, 1),
        (_THREADS, 1, 1),
    )
    return largest, convert
