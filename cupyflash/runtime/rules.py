"""The rules that arguments must keep, each with an error that says what would work."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .dtypes import BF16, FP16, FP32, ScalarType, parse_fp8, scalar_type

__all__ = [
    "ArraySpec",
    "check_bound",
    "check_descales",
    "check_head_dims",
    "check_heads",
    "check_lengths",
    "check_lse_type",
    "check_modifiers",
    "check_output",
    "check_rank",
    "check_sequences",
    "check_softcap",
    "output_type",
    "page_size",
    "python_scalar",
    "spec_of",
    "storage_types",
    "window",
]

_LARGEST_HEAD_DIM = 256


class ArraySpec(NamedTuple):
    """What the rules see of an array: no memory, no address."""

    shape: tuple[int, ...]
    dtype: Any
    unit_stride: bool


def spec_of(array: Any) -> ArraySpec:
    """The spec of an array."""
    shape = array.shape
    unit = not shape or shape[-1] <= 1 or array.strides[-1] == array.itemsize or 0 in shape
    return ArraySpec(shape, array.dtype, unit)


def python_scalar(name: str, value: Any) -> float:
    """A number that is known on the host.

    Raises
    ------
    TypeError
        It is an array on a GPU (reading it would synchronise), or not a real number.
    ValueError
        It is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number, np.ndarray)):
        raise TypeError(
            f"{name} is {type(value).__name__}; pass a Python or NumPy number (an array on a GPU "
            "would have to be read back: call float() on it yourself)"
        )
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"{name} has shape {value.shape}; pass one number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{name}={found} must be finite")
    return found


def check_rank(name: str, spec: ArraySpec, rank: int, layout: str) -> tuple[int, ...]:
    """The shape of an operand with ``rank`` dimensions and a contiguous last one."""
    if len(spec.shape) != rank:
        raise ValueError(f"{name} has shape {spec.shape}; it must be {layout}")
    if not spec.unit_stride:
        raise ValueError(
            f"{name} with shape {spec.shape} has a last dimension that is not contiguous; make it "
            "so (ascontiguousarray); all other strides may be anything"
        )
    return spec.shape


def check_sequences(
    cu_seqlens_q: ArraySpec | None,
    cu_seqlens_k: ArraySpec | None,
    seqused_k: ArraySpec | None,
    block_table: ArraySpec | None,
) -> None:
    """Lengths and tables: int32, consistent with each other, the right ones for the K layout."""
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is missing; it is int32 [batch + 1]")
    given = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    for name, spec in (*given, ("seqused_k", seqused_k)):
        if spec is not None:
            _check_int32(name, spec, 1)
            if not spec.unit_stride:
                raise ValueError(f"{name} must be contiguous")
    if len(cu_seqlens_q.shape) != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q has shape {cu_seqlens_q.shape}; it must be [batch + 1]")
    batch = cu_seqlens_q.shape[0] - 1
    if block_table is not None:
        _check_int32("block_table", block_table, 2)
        if not block_table.unit_stride:
            raise ValueError("block_table must have contiguous rows; the row stride may be any")
        if seqused_k is None:
            raise ValueError("block_table needs seqused_k, the key count of each request [batch]")
        if cu_seqlens_k is not None:
            raise ValueError("block_table and cu_seqlens_k exclude each other; drop cu_seqlens_k")
        _check_length("block_table", block_table, batch, "[batch, max_blocks]")
    elif cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k is missing; packed k and v need it, int32 [batch + 1]")
    elif cu_seqlens_k.shape[0] != batch + 1:
        raise ValueError(
            f"cu_seqlens_k has shape {cu_seqlens_k.shape}; cu_seqlens_q says [{batch + 1}]"
        )
    if seqused_k is not None:
        _check_length("seqused_k", seqused_k, batch, "[batch]")


def _check_int32(name: str, spec: ArraySpec, rank: int) -> None:
    if spec.dtype != np.int32:
        raise TypeError(f"{name} is {spec.dtype}; it must be int32")
    if len(spec.shape) != rank:
        raise ValueError(f"{name} has shape {spec.shape}; it must have {rank} dimension(s)")


def _check_length(name: str, spec: ArraySpec, batch: int, layout: str) -> None:
    if spec.shape[0] != batch:
        raise ValueError(
            f"{name} has shape {spec.shape}, but cu_seqlens_q holds {batch} requests; it must be "
            f"{layout}"
        )


def check_lengths(name: str, spec: ArraySpec | None, size: int) -> None:
    """An int32 array [size], contiguous."""
    if spec is None:
        raise ValueError(f"{name} is missing; it is int32 [{size}]")
    _check_int32(name, spec, 1)
    if spec.shape[0] != size or not spec.unit_stride:
        raise ValueError(f"{name} has shape {spec.shape}; it must be contiguous [{size}]")


def check_heads(
    heads_q: int, heads_kv: int, heads_v: int, rows_k: list[int], rows_v: list[int]
) -> None:
    """K and V agree, and every KV head serves a whole number of query heads."""
    if heads_v != heads_kv or rows_k != rows_v:
        raise ValueError(
            f"k has {rows_k} rows and {heads_kv} heads, v has {rows_v} and {heads_v}; they must "
            "be the same"
        )
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise ValueError(
            f"{heads_q} query heads and {heads_kv} KV heads: query heads must be a positive "
            "multiple of KV heads"
        )


def check_head_dims(head_dim: int, head_dim_k: int, head_dim_v: int) -> None:
    """Multiples of 8 up to 256, the same for q and k."""
    if head_dim_k != head_dim:
        raise ValueError(f"q has head size {head_dim} and k {head_dim_k}; they must be the same")
    for name, size in (("q and k", head_dim), ("v", head_dim_v)):
        if size % 8 or not 0 < size <= _LARGEST_HEAD_DIM:
            nearest = min(max(8, -(-size // 8) * 8), _LARGEST_HEAD_DIM)
            raise ValueError(
                f"head size {size} of {name}: it must be a multiple of 8 from 8 to "
                f"{_LARGEST_HEAD_DIM}; the nearest is {nearest} (pad with zeros and pass "
                "softmax_scale)"
            )


def storage_types(
    q: ArraySpec, k: ArraySpec, v: ArraySpec, fp8: str, q_fp8: str | None, on_host: bool
) -> tuple[ScalarType, ScalarType]:
    """The types of q and of k and v; uint8 holds the fp8 format that the call names."""
    named = parse_fp8(fp8)
    q_named = named if q_fp8 is None else parse_fp8(q_fp8, "q_fp8_dtype")
    q_type = _storage_type("q", q, q_named)
    kv_type = _storage_type("k", k, named)
    if _storage_type("v", v, named) != kv_type:
        raise TypeError(f"k is {k.dtype} and v is {v.dtype}; they must have one dtype")
    if not kv_type.is_fp8 and kv_type != q_type:
        raise TypeError(
            f"q is {q_type.name}, k and v are {kv_type.name}; they must be the same, or k and v fp8"
        )
    if FP32 in (q_type, kv_type) and not on_host:
        raise TypeError("float32 attention runs on NumPy arrays only; use float16 or bfloat16")
    return q_type, kv_type


def _storage_type(name: str, spec: ArraySpec, fp8: ScalarType) -> ScalarType:
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
    if found not in allowed:
        names = " or ".join(t.name for t in allowed)
        raise TypeError(f"out is {out.dtype}; for q in {q_type.name} it must be {names}")
    assert found is not None
    return found


def check_output(name: str, spec: ArraySpec | None, shape: tuple[int, ...]) -> None:
    """An output of the caller's has exactly the shape of the result."""
    if spec is not None and (spec.shape != shape or not spec.unit_stride):
        raise ValueError(
            f"{name} has shape {spec.shape}{'' if spec.unit_stride else ', not contiguous'}; it "
            f"must be {list(shape)} with a contiguous last dimension"
        )


def check_lse_type(lse: ArraySpec | None) -> None:
    if lse is not None and lse.dtype != np.float32:
        raise TypeError(f"lse is {lse.dtype}; it must be float32")


def page_size(k: ArraySpec) -> int:
    size = k.shape[1]
    if size < 1:
        raise ValueError(f"k has shape {k.shape}: the block size must be at least 1")
    return size


def window(window_size: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """The inclusive reach to the left and right; -1 is open, causal closes the right."""
    if window_size is None:
        window_size = (-1, -1)
    if len(window_size) != 2 or any(type(side) is not int for side in window_size):
        raise ValueError(f"window_size={window_size!r} must be two integers (left, right)")
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size={window_size!r}: each side is the number of keys seen, or -1 for all"
        )
    return left, 0 if causal else right


def check_modifiers(
    alibi_slopes: ArraySpec | None, s_aux: ArraySpec | None, heads_q: int, batch: int
) -> None:
    """ALiBi slopes and sinks, one per query head."""
    if alibi_slopes is not None:
        if alibi_slopes.dtype != np.float32:
            raise TypeError(f"alibi_slopes is {alibi_slopes.dtype}; it must be float32")
        if alibi_slopes.shape not in ((heads_q,), (batch, heads_q)):
            raise ValueError(
                f"alibi_slopes has shape {alibi_slopes.shape}; it must be [{heads_q}] or "
                f"[{batch}, {heads_q}]"
            )
        check_output("alibi_slopes", alibi_slopes, alibi_slopes.shape)
    if s_aux is not None:
        kind = scalar_type(s_aux.dtype)
        if kind is None or kind.is_fp8:
            raise TypeError(f"s_aux is {s_aux.dtype}; use float32, float16 or bfloat16")
        check_output("s_aux", s_aux, (heads_q,))


def check_descales(
    descales: tuple[Any, Any, Any],
    q_type: ScalarType,
    kv_type: ScalarType,
    batch: int,
    heads_kv: int,
) -> None:
    """Descales belong to 8-bit operands: float32 [batch, Hk] of any stride, [1], or a number."""
    names = ("q_descale", "k_descale", "v_descale")
    for name, spec, kind in zip(names, descales, (q_type, kv_type, kv_type), strict=True):
        if spec is None:
            continue
        if not kind.is_fp8:
            raise ValueError(f"{name} given, but {name[0]} is {kind.name}; only fp8 takes a scale")
        if not isinstance(spec, ArraySpec):
            continue
        if spec.dtype != np.float32:
            raise TypeError(f"{name} is {spec.dtype}; it must be float32")
        if spec.shape not in ((), (1,), (batch, heads_kv)):
            raise ValueError(
                f"{name} has shape {spec.shape}; it must be [{batch}, {heads_kv}] "
                "([batch, num_heads_kv]), [1] or a number"
            )


def check_bound(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{name}={value!r} must be an integer of at least 0, known on the host")


def check_softcap(softcap: float) -> None:
    if not softcap >= 0:
        raise ValueError(f"softcap={softcap} must be 0 (off) or positive")
