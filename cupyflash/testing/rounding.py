"""Storage types by name, and rounding to them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["DTYPES", "half_ulp", "round_to", "saturate"]

DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def round_to(values: Any, dtype: Any) -> NDArray[Any]:
    """Values rounded to nearest even in ``dtype``, as a plain cast does it."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(dtype)


def saturate(values: Any, dtype: Any) -> NDArray[Any]:
    """float32 values as fp8: what is too large becomes the largest finite, NaN the byte 0x7F."""
    values = np.asarray(values, np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    inside = np.where(np.isnan(values), np.float32(0), values)
    inside = np.where(inside > largest, largest, np.where(inside < -largest, -largest, inside))
    stored = round_to(inside, dtype)
    return np.where(np.isnan(values), np.uint8(0x7F), stored.view(np.uint8)).view(dtype)


def half_ulp(magnitude: Any, dtype: Any) -> Any:
    """Half the distance of neighbouring numbers of ``dtype`` at a magnitude, or at each of many."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant - 1)
