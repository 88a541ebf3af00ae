"""The Llama architecture over a paged KV cache; attention is a cupyflash backend's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.backend import BackendConfig, KVCacheSpec
from cupyflash.backends import get_attn_backend

from .batch import Array, Batch
from .config import Config
from .device import capability_of
from .gguf_file import GGUFFile
from .kv_cache import KVCache
from .matmul import make_matmul
from .runner import Runner

__all__ = ["Model"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer; matrices are [out, in]."""

    attention_norm: Array
    qkv: Array
    attention_out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array
    attention: Any  # the backend's implementation of this layer


class Model:
    """Weights and the forward pass.

    On a GPU matrices and cache are float16, sums and the residual stream float32; with NumPy
    everything is float32.
    """

    def __init__(self, file: GGUFFile, xp: Any = np) -> None:
        self.config = config = Config.read(file)
        self.xp, self.dtype = xp, np.float32 if xp is np else np.float16
        asked = config.asked_of_attention(self.dtype)
        self.backend = get_attn_backend(asked, capability_of(xp))
        self._matmul = make_matmul(xp)
        self._embedding = self._matrix(file.tensor("token_embd.weight"))
        self._final_norm = xp.asarray(file.tensor("output_norm.weight"))
        self._layers = [self._layer(file, index) for index in range(config.layers)]
        pairs = np.arange(0, config.head_dim, 2) / config.head_dim
        angles = np.arange(config.context)[:, None] / config.rope_base**pairs
        self._cos = xp.asarray(np.cos(angles), np.float32)
        self._sin = xp.asarray(np.sin(angles), np.float32)

    def new_cache(self, num_blocks: int, block_size: int = 16) -> KVCache:
        return KVCache(self.config, num_blocks, block_size, self.xp, self.dtype, self.backend)

    def runner(
        self, cache: KVCache, token_budget: int, max_requests: int, max_blocks: int, graphs: bool
    ) -> Runner:
        """What computes an engine's batches; see `Runner`."""
        return Runner(self, cache, token_budget, max_requests, max_blocks, graphs)

    def make_builder(self, block_size: int, max_requests: int, graph_tokens: int = 0) -> Any:
        """The backend's metadata builder.

        Parameters
        ----------
        block_size, max_requests : int
        graph_tokens : int
            Most tokens of a captured step; 0 = none is captured.
        """
        layers = {f"layers.{i}": layer.attention for i, layer in enumerate(self._layers)}
        config = self.config
        spec = KVCacheSpec(block_size, config.kv_heads, config.head_dim, self.dtype)
        limits = BackendConfig(
            max_num_seqs=max_requests,
            layers=layers,
            full_cuda_graphs=graph_tokens > 0,
            max_cudagraph_capture_size=graph_tokens,
        )
        return self.backend.get_builder_cls()(spec, list(layers), limits)

    def _matrix(self, weight: np.ndarray) -> Array:
        return self.xp.asarray(weight.astype(self.dtype, copy=False))

    def _layer(self, file: GGUFFile, index: int) -> _Layer:
        def tensor(name: str) -> np.ndarray:
            return file.tensor(f"blk.{index}.{name}.weight")

        config, impl = self.config, self.backend.get_impl_cls()
        qkv = np.concatenate([tensor(f"attn_{name}") for name in "qkv"])
        gate_up = np.concatenate([tensor("ffn_gate"), tensor("ffn_up")])
        return _Layer(
            self.xp.asarray(tensor("attn_norm")),
            self._matrix(qkv),
            self._matrix(tensor("attn_output")),
            self.xp.asarray(tensor("ffn_norm")),
            self._matrix(gate_up),
            self._matrix(tensor("ffn_down")),
            impl(config.heads, config.head_dim, config.head_dim**-0.5, config.kv_heads),
        )

    def forward(self, batch: Batch, metadata: Any, cache: KVCache) -> Array:
        """Write the new keys and values; logits [len(batch.logit_rows), vocabulary], float32.

        The batch's arrays are where the weights are; nothing is copied to or from the host.

        Parameters
        ----------
        batch : Batch
        metadata
            What the builder made of ``batch.common``.
        cache : KVCache
        """
        rope = self._cos[batch.positions][:, None], self._sin[batch.positions][:, None]
        x = self._embedding[batch.tokens].astype(np.float32)
        for layer, kv_cache in zip(self._layers, cache.layers, strict=True):
            normed = self._norm(x, layer.attention_norm)
            x = x + self._attention(layer, normed, rope, metadata, kv_cache)
            x = x + self._feed_forward(layer, self._norm(x, layer.ffn_norm))
        last = self._norm(x[batch.logit_rows], self._final_norm)
        return self._matmul(last, self._embedding, np.float32)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(-1, keepdims=True)
        normed = x * (weight / self.xp.sqrt(mean_square + self.config.epsilon))
        return normed.astype(self.dtype, copy=False)

    def _attention(
        self, layer: _Layer, x: Array, rope: Any, metadata: Any, kv_cache: Array
    ) -> Array:
        config = self.config
        qkv = self._matmul(x, layer.qkv).reshape(len(x), -1, config.head_dim)
        q = self._rotate(qkv[:, : config.heads], rope)
        k = self._rotate(qkv[:, config.heads : config.heads + config.kv_heads], rope)
        v = qkv[:, config.heads + config.kv_heads :]
        # No scales to read: the cache is not quantised.
        layer.attention.do_kv_cache_update(None, k, v, kv_cache, metadata.slot_mapping)
        out = self.xp.empty_like(q)
        layer.attention.forward(None, q, k, v, kv_cache, metadata, out)
        return self._matmul(out.reshape(len(x), -1), layer.attention_out)

    def _rotate(self, x: Array, rope: tuple[Array, Array]) -> Array:
        """Rotary embedding of neighbouring pairs, as GGUF orders Llama's heads."""
        cos, sin = rope
        even, odd = x[..., 0::2], x[..., 1::2]
        out = self.xp.empty(x.shape, self.dtype)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out

    def _feed_forward(self, layer: _Layer, x: Array) -> Array:
        gate, up = self.xp.split(self._matmul(x, layer.gate_up, np.float32), 2, axis=-1)
        # silu(x) = x sigmoid(x), by tanh, which cannot overflow.
        hidden = gate * (0.5 + 0.5 * self.xp.tanh(0.5 * gate)) * up
        return self._matmul(hidden.astype(self.dtype, copy=False), layer.down)
