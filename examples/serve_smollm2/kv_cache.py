"""The paged KV cache of all layers."""

from __future__ import annotations

from typing import Any

from cupyflash.backend import AttentionBackend
from cupyflash.backends import ReferenceBackend

from .config import Config

__all__ = ["KVCache"]


class KVCache:
    """One array a layer, [2, num_blocks, block_size, Hk, D]: keys, then values.

    Parameters
    ----------
    config : Config
    num_blocks, block_size : int
    xp : module
        NumPy or CuPy.
    dtype : dtype
    backend : type
        Gives the shape.
    """

    def __init__(
        self,
        config: Config,
        num_blocks: int,
        block_size: int,
        xp: Any,
        dtype: Any,
        backend: type[AttentionBackend] = ReferenceBackend,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size} must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = backend.get_kv_cache_shape(num_blocks, block_size, config.kv_heads, config.head_dim)
        self.layers = [xp.zeros(shape, dtype) for _ in range(config.layers)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return sum(layer.nbytes for layer in self.layers) // self.num_blocks
