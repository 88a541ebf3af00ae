"""Scalar types: NumPy's view, the kernels' macro value, and every spelling of an fp8 format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "FP32",
    "ScalarType",
    "parse_fp8",
    "parse_scalar_type",
    "scalar_type",
]


@dataclass(frozen=True, slots=True)
class ScalarType:
    """One storage type.

    ``code`` is the value that kernels see in a ``*_TYPE`` macro (core/variant.cuh holds the same
    numbers). ``numpy`` is the dtype that computes with it; fp8 arrays may also be stored as uint8.
    """

    name: str
    code: int
    itemsize: int
    numpy: np.dtype[Any]

    @property
    def is_fp8(self) -> bool:
        return self.itemsize == 1


FP32 = ScalarType("fp32", 0, 4, np.dtype(np.float32))
FP16 = ScalarType("fp16", 1, 2, np.dtype(np.float16))
BF16 = ScalarType("bf16", 2, 2, np.dtype(ml_dtypes.bfloat16))
E4M3 = ScalarType("e4m3", 3, 1, np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = ScalarType("e5m2", 4, 1, np.dtype(ml_dtypes.float8_e5m2))

_BY_DTYPE = {t.numpy: t for t in (FP32, FP16, BF16, E4M3, E5M2)}
_FP8 = {
    **dict.fromkeys(
        ("e4m3", "e4m3fn", "fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn", "float8_e4m3"), E4M3
    ),
    **dict.fromkeys(("e5m2", "fp8_e5m2", "float8_e5m2"), E5M2),
}
_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float"), FP32),
    **dict.fromkeys(("fp16", "float16", "half"), FP16),
    **dict.fromkeys(("bf16", "bfloat16"), BF16),
    **_FP8,
}


def scalar_type(dtype: Any) -> ScalarType | None:
    """The type of an array's dtype; None for uint8 (an fp8 format must be named) and all others."""
    return _BY_DTYPE.get(dtype)


def parse_fp8(spelling: str, argument: str = "fp8_dtype") -> ScalarType:
    """The fp8 type that a spelling names.

    Raises
    ------
    ValueError
        The spelling is not one of those known.
    """
    found = _FP8.get(spelling.lower()) if isinstance(spelling, str) else None
    if found is None:
        raise ValueError(
            f"{argument}={spelling!r} is not an fp8 format; use one of {', '.join(_FP8)}"
        )
    return found


def parse_scalar_type(spelling: Any, argument: str = "dtype") -> ScalarType:
    """The type that a name or a NumPy dtype stands for.

    Raises
    ------
    ValueError
        The name or dtype is not one of those known.
    """
    if isinstance(spelling, str):
        found = _NAMES.get(spelling.lower().removeprefix("torch."))
    else:
        found = scalar_type(np.dtype(spelling))
    if found is None:
        raise ValueError(
            f"{argument}={spelling!r} is not a known type; use one of {', '.join(_NAMES)}"
        )
    return found
