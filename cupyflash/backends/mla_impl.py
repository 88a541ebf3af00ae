"""One layer of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from cupyflash.backend import AttentionImpl, AttentionLayer
from cupyflash.distributed.attention import context_parallel_attention
from cupyflash.latent_cache import concat_and_cache_mla, gather_latent_cache, split_latent_cache
from cupyflash.mla import ContextChunk, mla_decode, mla_prefill
from cupyflash.runtime.arrays import array_module

from .dcp import check_has_group
from .latent_fp8 import dequantised, is_fp8_cache
from .mla_metadata import MLADecode, MLAMetadata, MLAPrefill, MLARanks

__all__ = ["MLAImpl"]

Array = Any  # NumPy or CuPy


def _matmul(a: Array, b: Array) -> Array:
    """a [H, n, k] times b [H, k, m], float32 sums, in the type of a."""
    xp = array_module(a)
    # CuPy's batched product of bfloat16 fails (cupy/cupy#10317).
    if xp is np or a.dtype.kind != "f":
        return xp.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    return xp.matmul(a, b)


class MLAImpl(AttentionImpl[MLAMetadata]):
    """One attention layer over a latent cache.

    Parameters
    ----------
    num_heads, head_size : int
        ``head_size`` is that of a cache row: ``kv_lora_rank + qk_rope_head_dim``.
    scale : float
        Multiplies q·k of the heads.
    num_kv_heads : int
        1.
    kv_cache_dtype : str
        ``"auto"``, the model's type by its name, or ``"fp8"``: e4m3, of which the layer's
        ``_k_scale`` is the scale of both parts.
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int
        Of the latent, of both parts of q and k, and of v.
    kv_b_proj : array [kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim)]
        Expands a latent to keys and values, heads outermost, keys before values.
    matmul : callable, optional
        a [H, n, k], b [H, k, m] to [H, n, m]: an engine that captures graphs passes one that may
        be captured.

    Raises
    ------
    ValueError
        Sizes that do not fit each other, or a cache in another 8-bit type.
    """

    can_return_lse_for_decode: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int = 1,
        kv_cache_dtype: str = "auto",
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Array,
        matmul: Callable[[Array, Array], Array] = _matmul,
    ) -> None:
        expanded = num_heads * (qk_nope_head_dim + v_head_dim)
        if num_kv_heads != 1 or head_size != kv_lora_rank + qk_rope_head_dim:
            raise ValueError(
                f"num_kv_heads={num_kv_heads}, head_size={head_size}: a latent cache has 1 and "
                f"kv_lora_rank + qk_rope_head_dim = {kv_lora_rank + qk_rope_head_dim}"
            )
        if kv_b_proj.shape != (kv_lora_rank, expanded):
            raise ValueError(
                f"kv_b_proj has shape {kv_b_proj.shape}; it must be [{kv_lora_rank}, {expanded}]: "
                "the latent, and keys and values of all heads"
            )
        self.fp8 = is_fp8_cache(kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim, self._matmul = v_head_dim, matmul
        xp = array_module(kv_b_proj)
        by_head = kv_b_proj.reshape(kv_lora_rank, num_heads, -1)
        keys, values = by_head[..., :qk_nope_head_dim], by_head[..., qk_nope_head_dim:]
        self._expand = kv_b_proj[None]
        self._absorb_keys = xp.ascontiguousarray(keys.transpose(1, 2, 0))  # [H, nope, latent]
        self._absorb_values = xp.ascontiguousarray(values.transpose(1, 0, 2))  # [H, latent, v]

    def forward(
        self,
        layer: AttentionLayer,
        query: Array,
        key: Array,
        value: Array,
        kv_cache: Array,
        attn_metadata: MLAMetadata | None,
        output: Array,
        output_scale: Array = None,
        output_block_scale: Array = None,
    ) -> Any:
        """Attention of a step's tokens, whose latents are in the cache already.

        Parameters
        ----------
        layer : AttentionLayer
            ``_k_scale`` is read where the cache is 8-bit.
        query : array [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]
            The second part rotated. Rows past ``num_actual_tokens`` are padding.
        key : array [tokens, kv_lora_rank]
            The new tokens' latents, normalised.
        value : array [tokens, 1, qk_rope_head_dim] or [tokens, qk_rope_head_dim]
            Their rotated keys. Both are read by prefill only.
        kv_cache : array [num_blocks, block_size, head_size]
        attn_metadata : MLAMetadata or None
            None = a profiling run: the output is 0.
        output : array [tokens, num_heads * v_head_dim] or [tokens, num_heads, v_head_dim]
            Contiguous; written in place, padding rows are left as they are.
        output_scale, output_block_scale
            Must be None: the output is not quantised here.

        Returns
        -------
        output : array

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            As `mla_decode` and `mla_prefill`; or an option that the backend does not have.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: attention writes 16 bit; quantise its output")
        if self.need_to_return_lse_for_decode:
            raise NotImplementedError(
                "need_to_return_lse_for_decode: states of ranks are merged inside of the layer"
            )
        if attn_metadata is None:
            output[...] = 0
            return output
        step = attn_metadata
        heads = output.reshape(output.shape[0], self.num_heads, self.v_head_dim)
        if heads.size and not array_module(output).shares_memory(heads, output):
            raise ValueError(f"output has strides {output.strides}; it must be contiguous")
        first, rope = 0, value.reshape(value.shape[0], self.qk_rope_head_dim)
        if step.decode is not None:
            first = step.decode.num_tokens
            new = key[:first], rope[:first]
            self._decode(layer, query[:first], new, kv_cache, step, step.decode, heads[:first])
        if step.prefill is not None:
            rows = slice(first, step.num_actual_tokens)
            new = self._expanded(key[rows], rope[rows])
            self._prefill(layer, query[rows], new, kv_cache, step, step.prefill, heads[rows])
        return output

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Array, value: Array, kv_cache: Array, slot_mapping: Array
    ) -> None:
        """Store latents and rotated keys at their slots; arguments as `forward`.

        Raises
        ------
        TypeError, ValueError
            As `concat_and_cache_mla`.
        """
        scale = layer._k_scale if self.fp8 else 1.0
        concat_and_cache_mla(key, value, kv_cache, slot_mapping, self.kv_cache_dtype, scale)

    def _decode(
        self,
        layer: AttentionLayer,
        query: Array,
        new: tuple[Array, Array],
        kv_cache: Array,
        step: MLAMetadata,
        decode: MLADecode,
        output: Array,
    ) -> None:
        """Absorbed: queries go to the space of the latent, results come back from it."""
        q_nope, q_pe = query[..., : self.qk_nope_head_dim], query[..., self.qk_nope_head_dim :]
        q_latent = self._matmul(q_nope.transpose(1, 0, 2), self._absorb_keys)
        absorbed = q_latent.transpose(1, 0, 2), q_pe
        if decode.ranks is None:
            descale = layer._k_scale if self.fp8 else None
            found = self._over_cache(absorbed, kv_cache, step, decode, descale)
        else:
            found = self._over_ranks(absorbed, new, kv_cache, step, decode, decode.ranks)
        values = self._matmul(found.transpose(1, 0, 2), self._absorb_values)
        output[...] = values.transpose(1, 0, 2)

    def _over_cache(
        self,
        absorbed: tuple[Array, Array],
        kv_cache: Array,
        step: MLAMetadata,
        decode: MLADecode,
        descale: Any,
    ) -> Array:
        return mla_decode(
            *(*absorbed, kv_cache, decode.block_table, decode.seq_lens),
            cu_seqlens_q=decode.query_start_loc,
            max_seqlen_q=decode.max_query_len,
            max_seqlen_k=decode.max_seq_len,
            softmax_scale=self.scale,
            causal=step.causal,
            batch_invariant=step.batch_invariant,
            kv_descale=descale,
        )

    def _over_ranks(
        self,
        absorbed: tuple[Array, Array],
        new: tuple[Array, Array],
        kv_cache: Array,
        step: MLAMetadata,
        decode: MLADecode,
        ranks: MLARanks,
    ) -> Array:
        """Over contexts on many ranks, and over the new tokens as they were given."""
        check_has_group(ranks.group)
        if self.fp8:
            raise NotImplementedError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} with decode context parallelism: new "
                "tokens are not of the type of the cache; use 'auto'"
            )
        (q_latent, q_pe), (latent, rope) = absorbed, (x[:, None] for x in new)
        latents, ropes = split_latent_cache(kv_cache, self.kv_lora_rank)
        return context_parallel_attention(
            ranks.group,
            q_pe,
            rope,
            latent,
            ropes,
            latents,
            cu_seqlens_q=decode.query_start_loc,
            max_seqlen_q=decode.max_query_len,
            context_lens=ranks.context_lens,
            max_context_len=ranks.max_context_len,
            block_table=decode.block_table,
            q_v=q_latent,
            softmax_scale=self.scale,
            causal=step.causal,
            out=array_module(q_latent).zeros(q_latent.shape, q_latent.dtype),
            batch_invariant=step.batch_invariant,
            combine=ranks.combine,
        )[0]

    def _prefill(
        self,
        layer: AttentionLayer,
        query: Array,
        new: tuple[Array, Array],
        kv_cache: Array,
        step: MLAMetadata,
        prefill: MLAPrefill,
        output: Array,
    ) -> None:
        mla_prefill(
            query,
            *new,
            prefill.query_start_loc,
            prefill.max_query_len,
            softmax_scale=self.scale,
            contexts=self._contexts(layer, kv_cache, prefill, query.dtype),
            causal=step.causal,
            out=output,
            batch_invariant=step.batch_invariant,
        )

    def _contexts(
        self, layer: AttentionLayer, kv_cache: Array, prefill: MLAPrefill, dtype: Any
    ) -> Iterator[ContextChunk]:
        for chunk in prefill.context:
            rows = gather_latent_cache(
                kv_cache, prefill.block_table, chunk.cu_seqlens, chunk.num_tokens, chunk.starts
            )
            if self.fp8:
                rows = dequantised(rows, layer._k_scale, dtype)
            latent, rope = rows[:, : self.kv_lora_rank], rows[:, self.kv_lora_rank :]
            yield ContextChunk(*self._expanded(latent, rope), chunk.cu_seqlens, chunk.max_len)

    def _expanded(self, latent: Array, rope: Array) -> tuple[Array, Array]:
        """Keys [tokens, H, nope + rope] and values [tokens, H, v] of all heads."""
        xp, tokens = array_module(latent), latent.shape[0]
        both = self._matmul(latent[None], self._expand).reshape(tokens, self.num_heads, -1)
        shared = xp.broadcast_to(rope[:, None], (tokens, self.num_heads, self.qk_rope_head_dim))
        keys = xp.concatenate([both[..., : self.qk_nope_head_dim], shared], axis=-1)
        return keys, both[..., self.qk_nope_head_dim :]
