"""How 8-bit tensor cores add products up: a model of what their sums lose."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["eight_bit_products"]

Float64 = NDArray[np.float64]

_STEP = 32  # products that are added at once, with the sum so far
_FRACTION_BITS = 13
"""Bits that are kept below the leading one of the largest addend.

DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) reports 14 bits in all for Hopper's products of e4m3.
"""


def eight_bit_products(q: Any, k: Any) -> Float64:
    """``q @ k.T``, in steps of 32 elements whose addends lose what is below 13 bits of the largest.

    Bit for bit what an H200 returned for random values (``wgmma_fp8_real`` of the emulator's
    conformance cases).

    Parameters
    ----------
    q : array [rows, head_dim]
    k : array [keys, head_dim]
        As they are stored: where a binade ends depends on descales.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    high = _exponent(q), _exponent(k)
    total = np.zeros((len(q), len(k)))
    for start in range(0, q.shape[1], _STEP):
        part = slice(start, start + _STEP)
        addends = np.concatenate([q[:, None, part] * k[None, :, part], total[..., None]], axis=-1)
        # The exponent of a product is the sum of those of its factors, wherever its leading bit is.
        top = (high[0][:, None, part] + high[1][None, :, part]).max(axis=-1)
        quantum = np.exp2(np.maximum(top, _exponent(total)) - _FRACTION_BITS)
        summed = np.trunc(addends / quantum[..., None]).sum(axis=-1) * quantum
        quantum = np.exp2(_exponent(summed) - _FRACTION_BITS)
        total = np.trunc(summed / quantum) * quantum
    return total


def _exponent(values: Float64) -> Float64:
    """Of the leading bit; far below all others for 0."""
    size = np.where(values != 0, np.abs(values), 2.0**-200)
    return np.asarray(np.floor(np.log2(size)), np.float64)
