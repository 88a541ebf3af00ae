"""The Llama architecture over a paged KV cache; attention and cache writes by cupyflash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import cupyflash

from .gguf_file import GGUFFile

__all__ = ["Batch", "Config", "Model"]

Array = Any  # of NumPy or CuPy


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_base: float
    epsilon: float

    @classmethod
    def read(cls, file: GGUFFile) -> Config:
        heads, hidden = file["llama.attention.head_count"], file["llama.embedding_length"]
        return cls(
            layers=file["llama.block_count"],
            hidden=hidden,
            heads=heads,
            kv_heads=file["llama.attention.head_count_kv"],
            head_dim=hidden // heads,
            context=file["llama.context_length"],
            rope_base=file["llama.rope.freq_base"],
            epsilon=file["llama.attention.layer_norm_rms_epsilon"],
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, request after request, and where their keys lie.

    Attributes
    ----------
    tokens, positions : ndarray [T]
    slots : ndarray [T], int64
        Where each token's key and value go in the cache.
    cu_seqlens_q : ndarray [requests + 1], int32
    seqused_k : ndarray [requests], int32
        Keys of each request, the new ones included.
    block_table : ndarray [requests, blocks], int32
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    cu_seqlens_q: np.ndarray
    seqused_k: np.ndarray
    block_table: np.ndarray


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
    """Weights, the KV cache and the forward pass.

    On a GPU the matrices and the cache are float16 and the residual stream float32; with NumPy
    everything is float32.
    """

    def __init__(self, file: GGUFFile, num_blocks: int, block_size: int = 16, xp: Any = np) -> None:
        self.config = config = Config.read(file)
        self.xp, self.dtype = xp, np.float32 if xp is np else np.float16
        self.num_blocks, self.block_size = num_blocks, block_size
        self._embedding = self._matrix(file.tensor("token_embd.weight"))
        self._final_norm = xp.asarray(file.tensor("output_norm.weight"))
        self._layers = [self._layer(file, index) for index in range(config.layers)]
        shape = (config.layers, 2, num_blocks, block_size, config.kv_heads, config.head_dim)
        self.cache = xp.zeros(shape, self.dtype)
        pairs = np.arange(0, config.head_dim, 2) / config.head_dim
        angles = np.arange(config.context)[:, None] / config.rope_base**pairs
        self._cos = xp.asarray(np.cos(angles), np.float32)
        self._sin = xp.asarray(np.sin(angles), np.float32)

    @property
    def block_bytes(self) -> int:
        """Cache bytes of one block, keys and values of all layers."""
        return self.cache.nbytes // self.num_blocks

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

    def logits(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """Run one step: write the new keys and values, return logits [len(rows), vocabulary].

        Parameters
        ----------
        batch : Batch
        rows : ndarray
            Indices into the batch's tokens whose next token is wanted.
        """
        xp = self.xp
        positions, slots = xp.asarray(batch.positions), xp.asarray(batch.slots)
        lengths = {
            "cu_seqlens_q": xp.asarray(batch.cu_seqlens_q),
            "seqused_k": xp.asarray(batch.seqused_k),
            "block_table": xp.asarray(batch.block_table),
            "max_seqlen_q": int(np.diff(batch.cu_seqlens_q).max()),
            "max_seqlen_k": int(batch.seqused_k.max()),
        }
        rope = self._cos[positions][:, None], self._sin[positions][:, None]
        x = self._embedding[xp.asarray(batch.tokens)].astype(np.float32)
        for layer, cache in zip(self._layers, self.cache, strict=True):
            x = x + self._attention(
                layer, cache, self._norm(x, layer.attention_norm), rope, slots, lengths
            )
            x = x + self._feed_forward(layer, self._norm(x, layer.ffn_norm))
        last = self._norm(x[xp.asarray(rows)], self._final_norm)
        found = (last @ self._embedding.T).astype(np.float32)
        return found if xp is np else xp.asnumpy(found)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(-1, keepdims=True)
        return (x * (weight / self.xp.sqrt(mean_square + self.config.epsilon))).astype(self.dtype)

    def _attention(
        self,
        layer: _Layer,
        cache: Array,
        x: Array,
        rope: Any,
        slots: Array,
        lengths: dict[str, Any],
    ) -> Array:
        config = self.config
        qkv = (x @ layer.qkv).reshape(len(x), -1, config.head_dim)
        q = self._rotate(qkv[:, : config.heads], rope)
        k = self._rotate(qkv[:, config.heads : config.heads + config.kv_heads], rope)
        v = qkv[:, config.heads + config.kv_heads :]
        cupyflash.reshape_and_cache_flash(k, v, cache[0], cache[1], slots, "auto", 1.0, 1.0)
        out = cupyflash.flash_attn_varlen_func(q, cache[0], cache[1], causal=True, **lengths)
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
        gate, up = self.xp.split((x @ layer.gate_up).astype(np.float32), 2, axis=-1)
        return (gate / (1 + self.xp.exp(-gate)) * up).astype(self.dtype) @ layer.down
