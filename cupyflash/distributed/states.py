"""Outputs and LSEs of the same queries in one buffer, so that one message carries both."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cupyflash.runtime.arrays import array_module

from .heads import own_lse, own_out

__all__ = ["States"]

Array = Any  # NumPy or CuPy


@dataclass(frozen=True, slots=True)
class States:
    """Attention states of some heads.

    Attributes
    ----------
    buffer : array [bytes], uint8
        What the other two are views of.
    out : array [tokens, heads, D]
    lse : array [heads, tokens], float32
    """

    buffer: Array
    out: Array
    lse: Array

    @classmethod
    def empty(cls, like: Array, shape: tuple[int, int, int], dtype: Any) -> States:
        """Room for outputs of ``shape`` [tokens, heads, D], in the memory that ``like`` is in."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize + shape[0] * shape[1] * 4
        return cls.over(array_module(like).empty(nbytes, np.uint8), shape, dtype)

    @classmethod
    def over(cls, buffer: Array, shape: tuple[int, int, int], dtype: Any) -> States:
        """Views of a buffer that `empty` made, here or on another rank."""
        tokens, heads, _ = shape
        split = prod(shape) * np.dtype(dtype).itemsize
        lse = buffer[split:].view(np.float32).reshape(heads, tokens)
        return cls(buffer, buffer[:split].view(dtype).reshape(shape), lse)

    @classmethod
    def of(cls, out: Array, lse: Array) -> States:
        """A copy of states that lie apart."""
        found = cls.empty(out, out.shape, out.dtype)
        found.out[...] = out
        found.lse[...] = lse
        return found

    def asked_by(self, rank: int, ranks: int, num_kv_heads: int) -> tuple[Array, Array]:
        """Output [tokens, Hq, D] and LSE [Hq, tokens] of a rank's heads; see `gather_heads`."""
        return own_out(self.out, rank, ranks, num_kv_heads), own_lse(
            self.lse, rank, ranks, num_kv_heads
        )
