"""Blocks of keys and values as float32, from packed or paged storage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash.runtime.problem import AttentionProblem

from .convert import Array, widen
from .tiles import Tiles, keys_before

__all__ = ["KeyValue"]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """Where the keys of each request lie.

    Only keys inside of a tile's range are ever read: a block that reaches past the range repeats
    the last key of it with a value of 0, and the mask drops it. So unused slots may hold anything.
    """

    problem: AttentionProblem
    k: Array
    v: Array
    starts: Array
    block_table: Array | None

    def check(self, starts_q: Array, k_lengths: Array, total_lengths: Array) -> None:
        """Refuse table entries that are read and lie outside of the cache."""
        if self.block_table is None or self.problem.page_size is None:
            return
        page, blocks = self.problem.page_size, self.k.shape[0]
        first = np.zeros_like(k_lengths)
        if self.problem.window_left >= 0:
            behind = total_lengths - np.diff(starts_q) - self.problem.window_left
            first = np.maximum(0, keys_before(self.problem, behind))
        last = np.where(np.diff(starts_q) > 0, k_lengths, 0)
        columns = np.arange(self.problem.max_blocks)
        for start in range(0, self.problem.batch, 1024):
            part = slice(start, start + 1024)
            used = columns >= first[part, None] // page
            used &= columns < -(-last[part, None] // page)
            entries = self.block_table[part]
            bad = used & ((entries < 0) | (entries >= blocks))
            if bad.any():
                row, column = np.argwhere(bad)[0]
                raise ValueError(
                    f"block_table[{start + row}, {column}]={entries[row, column]} is used by a "
                    f"key and must lie in 0..{blocks - 1}, the blocks of the cache"
                )

    def block(self, tiles: Tiles, begin: Array, width: int) -> tuple[Array, Array]:
        """Keys ``begin`` up to ``begin + width`` of each tile.

        Returns
        -------
        k : ndarray [tiles, num_heads_kv, head_dim, width]
        v : ndarray [tiles, num_heads_kv, width, head_dim_v]
        """
        position = begin[:, None] + np.arange(width)
        past = position >= tiles.kv_end[:, None]
        inside = not past.any()
        if not inside:
            np.minimum(position, tiles.kv_end[:, None] - 1, out=position)
        index: tuple[Array | slice, ...]
        if self.block_table is not None:
            page = self.k.shape[1]
            column, offset = np.divmod(position, page)
            index = (self.block_table[tiles.request[:, None], column], offset)
        elif inside and len(tiles) == 1:
            start = int(self.starts[tiles.request[0]] + begin[0])
            index = (slice(start, start + width),)
        else:
            index = (self.starts[tiles.request][:, None] + position,)
        kind = self.problem.kv_type
        k, v = widen(self.k[index], kind), widen(self.v[index], kind)
        if k.ndim == 3:
            k, v = k[None], v[None]
        if not inside:
            v[past] = 0  # a copy of an infinite value would meet a weight of 0
        return k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
