"""The paged KV cache of all layers."""

from __future__ import annotations

from typing import Any

from .config import Config

__all__ = ["KVCache"]


class KVCache:
    """One array a layer and side, [num_blocks, block_size, Hk, D].

    Parameters
    ----------
    config : Config
    num_blocks, block_size : int
    xp : module
        NumPy or CuPy.
    dtype : dtype
    """

    def __init__(
        self, config: Config, num_blocks: int, block_size: int, xp: Any, dtype: Any
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size} must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, block_size, config.kv_heads, config.head_dim)
        self.layers = [
            (xp.zeros(shape, dtype), xp.zeros(shape, dtype)) for _ in range(config.layers)
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers) // self.num_blocks
