"""How 8-bit tensor cores add products up: a model of what their sums lose."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["eight_bit_products", "eight_bit_sums"]

Float64 = NDArray[np.float64]

_STEP = 32  # products that are added at once, with the sum so far
_FRACTION_BITS = 13
"""Bits that are kept below the leading one of the largest addend.

DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) reports 14 bits in all for Hopper's products of e4m3.
"""


def eight_bit_products(q: Any, k: Any) -> Float64:
    """``q @ k.T`` by `eight_bit_sums`.

    Parameters
    ----------
    q : array [rows, head_dim]
    k : array [keys, head_dim]
    """
    return eight_bit_sums(np.asarray(q)[:, None], np.asarray(k)[None])


def eight_bit_sums(q: Any, k: Any) -> Float64:
    """Products of q and k added up in steps of 32, less what is below 13 bits of the largest.

    Bit for bit what an H200 returned for random values (``wgmma_fp8_real`` of the emulator's
    conformance cases).

    Parameters
    ----------
    q, k : array [..., head_dim]
        As they are stored: where a binade ends depends on descales.

    Returns
    -------
    array [...], float64
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    high = _exponent(q), _exponent(k)
    total = np.zeros(np.broadcast_shapes(q.shape, k.shape)[:-1])
    for start in range(0, q.shape[-1], _STEP):
        part = slice(start, start + _STEP)
        addends = np.concatenate([q[..., part] * k[..., part], total[..., None]], axis=-1)
        # The exponent of a product is the sum of those of its factors, wherever its leading bit is.
        top = (high[0][..., part] + high[1][..., part]).max(axis=-1)
        quantum = np.exp2(np.maximum(top, _exponent(total)) - _FRACTION_BITS)
        summed = np.trunc(addends / quantum[..., None]).sum(axis=-1) * quantum
        quantum = np.exp2(_exponent(summed) - _FRACTION_BITS)
        total = np.trunc(summed / quantum) * quantum
    return total


def _exponent(values: Float64) -> Float64:
    """Of the leading bit; far below all others for 0."""
    size = np.where(values != 0, np.abs(values), 2.0**-200)
    return np.asarray(np.floor(np.log2(size)), np.float64)
