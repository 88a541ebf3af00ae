"""Latent caches in 8 bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyflash.runtime.arrays import array_module
from cupyflash.runtime.dtypes import E4M3, parse_fp8

__all__ = ["dequantised", "is_fp8_cache"]

Array = Any  # NumPy or CuPy
_PLAIN = ("auto", "float16", "bfloat16", "float32")


def is_fp8_cache(kv_cache_dtype: str) -> bool:
    """Whether a cache of this spelling is e4m3.

    Raises
    ------
    ValueError
        It is another 8-bit type, or unknown.
    """
    if kv_cache_dtype in _PLAIN:
        return False
    if parse_fp8(kv_cache_dtype, "kv_cache_dtype") != E4M3:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r}: a latent cache of 8 bits is e4m3; use 'fp8'"
        )
    return True


def dequantised(rows: Array, scale: Any, dtype: Any) -> Array:
    """Bytes of e4m3 times the scale of the cache, in another type."""
    xp = array_module(rows)
    table = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (xp.asarray(table)[rows.view(np.uint8)] * scale).astype(dtype)
