"""The Llama architecture over a paged KV cache; attention and cache writes by cupyflash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import cupyflash

from .batch import Array, Batch
from .config import Config
from .gguf_file import GGUFFile
from .kv_cache import KVCache

__all__ = ["Model"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; matrices are [in, out]."""

    attention_norm: Array
    qkv: Array
    attention_out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


class Model:
    """Weights and the forward pass.

    On a GPU matrices and cache are float16, sums and the residual stream float32; with NumPy
    everything is float32.
    """

    def __init__(self, file: GGUFFile, xp: Any = np) -> None:
        self.config = config = Config.read(file)
        self.xp, self.dtype = xp, np.float32 if xp is np else np.float16
        self._embedding = self._matrix(file.tensor("token_embd.weight"))
        self._final_norm = xp.asarray(file.tensor("output_norm.weight"))
        self._layers = [self._layer(file, index) for index in range(config.layers)]
        pairs = np.arange(0, config.head_dim, 2) / config.head_dim
        angles = np.arange(config.context)[:, None] / config.rope_base**pairs
        self._cos = xp.asarray(np.cos(angles), np.float32)
        self._sin = xp.asarray(np.sin(angles), np.float32)

    def new_cache(self, num_blocks: int, block_size: int = 16) -> KVCache:
        return KVCache(self.config, num_blocks, block_size, self.xp, self.dtype)

    def _matrix(self, weight: np.ndarray) -> Array:
        return self.xp.asarray(weight.astype(self.dtype, copy=False))

    def _layer(self, file: GGUFFile, index: int) -> _Layer:
        def tensor(name: str) -> np.ndarray:
            return file.tensor(f"blk.{index}.{name}.weight")

        qkv = np.concatenate([tensor(f"attn_{name}") for name in "qkv"])
        gate_up = np.concatenate([tensor("ffn_gate"), tensor("ffn_up")])
        return _Layer(
            self.xp.asarray(tensor("attn_norm")),
            self._matrix(qkv).T,
            self._matrix(tensor("attn_output")).T,
            self.xp.asarray(tensor("ffn_norm")),
            self._matrix(gate_up).T,
            self._matrix(tensor("ffn_down")).T,
        )

    def forward(self, batch: Batch, cache: KVCache) -> Array:
        """Write the new keys and values; logits [len(batch.logit_rows), vocabulary], float32.

        The batch's arrays are where the weights are; nothing is copied to or from the host.
        """
        rope = self._cos[batch.positions][:, None], self._sin[batch.positions][:, None]
        x = self._embedding[batch.tokens].astype(np.float32)
        for layer, keys_values in zip(self._layers, cache.layers, strict=True):
            normed = self._norm(x, layer.attention_norm)
            x = x + self._attention(layer, normed, rope, batch, *keys_values)
            x = x + self._feed_forward(layer, self._norm(x, layer.ffn_norm))
        last = self._norm(x[batch.logit_rows], self._final_norm)
        return (last @ self._embedding.T).astype(np.float32, copy=False)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(-1, keepdims=True)
        normed = x * (weight / self.xp.sqrt(mean_square + self.config.epsilon))
        return normed.astype(self.dtype, copy=False)

    def _attention(
        self, layer: _Layer, x: Array, rope: Any, batch: Batch, k_cache: Array, v_cache: Array
    ) -> Array:
        config = self.config
        qkv = (x @ layer.qkv).reshape(len(x), -1, config.head_dim)
        q = self._rotate(qkv[:, : config.heads], rope)
        k = self._rotate(qkv[:, config.heads : config.heads + config.kv_heads], rope)
        v = qkv[:, config.heads + config.kv_heads :]
        cupyflash.reshape_and_cache_flash(k, v, k_cache, v_cache, batch.slots, "auto", 1.0, 1.0)
        out = cupyflash.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            batch.max_seqlen_q,
            batch.cu_seqlens_q,
            batch.max_seqlen_k,
            seqused_k=batch.seqused_k,
            block_table=batch.block_table,
            causal=True,
        )
        return out.reshape(len(x), -1) @ layer.attention_out

    def _rotate(self, x: Array, rope: tuple[Array, Array]) -> Array:
        """Rotary embedding of neighbouring pairs, as GGUF orders Llama's heads."""
        cos, sin = rope
        even, odd = x[..., 0::2], x[..., 1::2]
        out = self.xp.empty(x.shape, self.dtype)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

    def _feed_forward(self, layer: _Layer, x: Array) -> Array:
        gate, up = self.xp.split((x @ layer.gate_up).astype(np.float32, copy=False), 2, axis=-1)
        # silu(x) = x sigmoid(x), by tanh, which cannot overflow.
        hidden = gate * (0.5 + 0.5 * self.xp.tanh(0.5 * gate)) * up
        return hidden.astype(self.dtype, copy=False) @ layer.down
