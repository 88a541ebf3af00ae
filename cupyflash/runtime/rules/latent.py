"""Multi-head latent attention: queries with a second part, which meets the values."""

from __future__ import annotations

from cupyflash.runtime.arrays import ArraySpec
from cupyflash.runtime.dtypes import E5M2, ScalarType, scalar_type

from .operands import check_operand

__all__ = ["check_latent", "is_latent"]


def is_latent(head_dim_v: int) -> bool:
    """Whether values of this size are only met by queries with ``q_v``."""
    return head_dim_v > 256


def check_latent(
    q_v: ArraySpec | None,
    shape: tuple[int, int, int],
    q_type: ScalarType,
    kv_type: ScalarType,
    softmax_scale: float | None,
) -> None:
    """``q_v`` has the shape of the result and the type of q; the scale is the caller's.

    Raises
    ------
    TypeError, ValueError
        Another shape or type, or no scale.
    NotImplementedError
        8-bit queries, or a cache in e5m2.
    """
    if q_v is None:
        return
    if check_operand("q_v", q_v, "[total_q, Hq, Dv]") != shape:
        raise ValueError(f"q_v has shape {q_v.shape}; q and v make it {list(shape)}")
    if q_type.is_fp8 or kv_type == E5M2:
        raise NotImplementedError(
            f"q_v with q in {q_type.name} and v in {kv_type.name}: latent attention takes queries "
            "of 16 bits, and a cache of their type or in e4m3; use float16 or bfloat16 queries"
        )
    if scalar_type(q_v.dtype) != q_type:
        raise TypeError(f"q_v is {q_v.dtype} and q {q_type.name}; they must have one dtype")
    if softmax_scale is None:
        raise ValueError(
            "softmax_scale is None: with q_v there is no usual default; pass the model's, which is "
            "that of the heads before absorption, such as (128 + 64) ** -0.5"
        )
