"""q, k, v, out and lse: ranks, strides, head counts, head sizes and types."""

from __future__ import annotations

import numpy as np

from cupyflash.runtime.arrays import ArraySpec
from cupyflash.runtime.dtypes import BF16, FP16, FP32, ScalarType, parse_fp8, scalar_type

__all__ = [
    "check_head_dims",
    "check_heads",
    "check_operand",
    "check_result",
    "operand_types",
    "output_type",
    "storage_type",
]

_LARGEST_HEAD_DIM = 256
_LARGEST_LATENT = {"q and k": 64, "v": 512}


def check_operand(name: str, spec: ArraySpec | None, layout: str) -> tuple[int, ...]:
    """The shape of an operand of this layout, the last dimension of it contiguous."""
    if spec is None:
        raise TypeError(f"{name} is None; it must be an array {layout}")
    if len(spec.shape) != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {spec.shape}; it must be {layout}")
    if not spec.unit_stride:
        raise ValueError(
            f"{name} has shape {spec.shape} and strides {spec.strides} bytes; the last dimension "
            "must be contiguous (ascontiguousarray makes it so), the others may be anything"
        )
    return spec.shape


def check_result(name: str, spec: ArraySpec | None, shape: tuple[int, ...]) -> None:
    """An output of the caller's has the shape of the result and memory of its own."""
    if spec is None:
        return
    if spec.shape != shape:
        raise ValueError(f"{name} has shape {spec.shape}; it must be {list(shape)}")
    check_operand(name, spec, str(list(shape)))
    if spec.overlaps:
        raise ValueError(f"{name} has strides {spec.strides}: its elements share memory")


def check_heads(
    heads_q: int, heads_kv: int, heads_v: int, rows_k: list[int], rows_v: list[int]
) -> None:
    """K and V agree, and every KV head serves a whole number of query heads."""
    if heads_v != heads_kv or rows_k != rows_v:
        raise ValueError(
            f"k is [{', '.join(map(str, (*rows_k, heads_kv)))}, D] and v "
            f"[{', '.join(map(str, (*rows_v, heads_v)))}, Dv]; they must be the same but for the "
            "head size"
        )
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise ValueError(
            f"{heads_q} query heads and {heads_kv} KV heads: the query heads must be a positive "
            "multiple of the KV heads"
        )


def check_head_dims(head_dim: int, head_dim_k: int, head_dim_v: int, latent: bool = False) -> None:
    """Multiples of 8 up to 256, the same for q and k; up to 64 and 512 with ``q_v``."""
    if head_dim_k != head_dim:
        raise ValueError(f"q has head size {head_dim} and k {head_dim_k}; they must be the same")
    for name, size in (("q and k", head_dim), ("v", head_dim_v)):
        largest = _LARGEST_LATENT[name] if latent else _LARGEST_HEAD_DIM
        if size % 8 or not 0 < size <= largest:
            nearest = min(max(8, -(-size // 8) * 8), largest)
            how = "" if size > nearest else " (pad with zeros and pass softmax_scale)"
            where = " with q_v" if latent else ""
            raise ValueError(
                f"head size {size} of {name}{where}: it must be a multiple of 8 from 8 to "
                f"{largest}; the nearest is {nearest}{how}"
            )


def operand_types(
    q: ArraySpec, k: ArraySpec, v: ArraySpec, fp8: str, q_fp8: str | None, on_host: bool
) -> tuple[ScalarType, ScalarType]:
    """The types of q, and of k and v; uint8 holds the fp8 format that the call names."""
    named = parse_fp8(fp8)
    q_type = storage_type("q", q, named if q_fp8 is None else parse_fp8(q_fp8, "q_fp8_dtype"))
    kv_type = storage_type("k", k, named)
    if storage_type("v", v, named) != kv_type:
        raise TypeError(f"k is {k.dtype} and v is {v.dtype}; they must have one dtype")
    if not kv_type.is_fp8 and kv_type != q_type:
        raise TypeError(
            f"q is {q_type.name}, k and v are {kv_type.name}; they must be the same, or k and v fp8"
        )
    if q_type is FP32 and not on_host:
        raise TypeError("float32 attention runs on NumPy arrays only; use float16 or bfloat16")
    return q_type, kv_type


def storage_type(name: str, spec: ArraySpec, fp8: ScalarType) -> ScalarType:
    """The type that an array stores; ``fp8`` for uint8."""
    found = fp8 if spec.dtype == np.uint8 else scalar_type(spec.dtype)
    if found is None:
        raise TypeError(
            f"{name} is {spec.dtype}; use float16, bfloat16, float32 (NumPy only), or fp8 as "
            "uint8 or an ml_dtypes type"
        )
    return found


def output_type(q_type: ScalarType, out: ArraySpec | None) -> ScalarType:
    """The type of ``out``: q's own; bfloat16 (or float16, if ``out`` is) for an 8-bit q."""
    allowed = (BF16, FP16) if q_type.is_fp8 else (q_type,)
    if out is None:
        return allowed[0]
    found = scalar_type(out.dtype)
    if found is None or found not in allowed:
        names = " or ".join(t.name for t in allowed)
        raise TypeError(f"out is {out.dtype}; for q in {q_type.name} it must be {names}")
    return found
