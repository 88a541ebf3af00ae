"""Which rank holds which token of a sequence, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.runtime.arrays import array_module

__all__ = ["Sharding"]

Array = Any  # NumPy or CuPy


@dataclass(frozen=True, slots=True)
class Sharding:
    """Tokens of each sequence dealt over ranks in runs of ``interleave_size``.

    Run ``n`` goes to rank ``n % size``. A rank's tokens, in order, are its own sequence: token
    ``i`` of it lies in block ``i // block_size`` of its row of the block table. So one row, the
    same on all ranks, covers ``size * block_size`` tokens a block.

    Attributes
    ----------
    size : int
        Ranks.
    interleave_size : int
        Neighbouring tokens on one rank; ``block_size`` is a multiple of it.
    block_size : int
        Tokens of a block on one rank.
    """

    size: int
    interleave_size: int = 1
    block_size: int = 16

    def __post_init__(self) -> None:
        if min(self.size, self.interleave_size, self.block_size) < 1:
            raise ValueError(
                f"size={self.size}, interleave_size={self.interleave_size}, "
                f"block_size={self.block_size} must be at least 1"
            )
        if self.block_size % self.interleave_size:
            raise ValueError(
                f"interleave_size={self.interleave_size} must divide "
                f"block_size={self.block_size}; the nearest is "
                f"{np.gcd(self.interleave_size, self.block_size)}"
            )

    def owner(self, position: Array) -> Array:
        """The rank that holds the token at each position: array [...]."""
        return position // self.interleave_size % self.size

    def local_index(self, position: Array) -> Array:
        """Where a token stands in the sequence of the rank that holds it: array [...]."""
        every = self.interleave_size
        return position // (self.size * every) * every + position % every

    def position(self, rank: int, local_index: Array) -> Array:
        """The inverse: the position in the whole sequence of a rank's token: array [...]."""
        run, offset = local_index // self.interleave_size, local_index % self.interleave_size
        return (run * self.size + rank) * self.interleave_size + offset

    def local_lengths(self, lengths: Array, rank: int | None = None) -> Array:
        """How many of each sequence's first tokens a rank holds.

        Parameters
        ----------
        lengths : array [...], int32
        rank : int, optional
            None = all ranks.

        Returns
        -------
        array [...], int32
            [..., size] for all ranks.
        """
        xp, every = array_module(lengths), self.interleave_size
        ranks = xp.arange(self.size, dtype=np.int32) if rank is None else np.int32(rank)
        lengths = lengths[..., None] if rank is None else lengths
        full = lengths // (every * self.size) * every
        rest = lengths - full * self.size - ranks * every
        return (full + xp.clip(rest, 0, every)).astype(np.int32)

    def max_local_length(self, max_length: int) -> int:
        """A bound of any rank's share of any length up to ``max_length``."""
        return -(-max_length // (self.interleave_size * self.size)) * self.interleave_size

    def slot_mapping(self, rank: int, block_table: Array, request: Array, position: Array) -> Array:
        """Where a rank stores new tokens: array [tokens], int64; -1 = another rank's.

        Parameters
        ----------
        rank : int
        block_table : array [requests, max_blocks], int32
        request : array [tokens]
            The row of each token.
        position : array [tokens]
            In its sequence.
        """
        xp, local = array_module(block_table), self.local_index(position)
        own = self.owner(position) == rank
        # Another rank's token may lie past this row's blocks; its column is not looked up.
        column = xp.where(own, local // self.block_size, 0)
        slots = block_table[request, column].astype(np.int64) * self.block_size
        return xp.where(own, slots + local % self.block_size, -1)
