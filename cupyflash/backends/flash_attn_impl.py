"""One layer of attention over the functional API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.backend import AttentionImpl, AttentionLayer, AttentionType
from cupyflash.kv_cache import reshape_and_cache_flash
from cupyflash.runtime.arrays import array_module
from cupyflash.runtime.dtypes import parse_fp8

from .dcp import check_has_group
from .descales import descale_arguments
from .flash_attn_metadata import FlashAttentionMetadata
from .flash_attn_passes import forward_cascade, forward_dcp, forward_encoder
from .kv_layout import split_kv_cache
from .window import UNCACHED, sliding_window_of, symmetrize_window

__all__ = ["FlashAttentionImpl"]

Array = Any  # NumPy or CuPy

_PLAIN = ("auto", "float16", "half", "bfloat16", "float32")


class FlashAttentionImpl(AttentionImpl[FlashAttentionMetadata]):
    """One attention layer.

    Parameters
    ----------
    num_heads, head_size : int
    scale : float
        Multiplies q·k.
    num_kv_heads : int
    alibi_slopes : sequence of float or array [num_heads], float32, optional
    sliding_window : int, optional
        Tokens that a query sees, itself included.
    kv_cache_dtype : str
        ``"auto"`` (the model's), a 16-bit name, or an fp8 spelling.
    logits_soft_cap : float, optional
    attn_type : AttentionType
    kv_sharing_target_layer_name : str, optional
        The layer whose cache this one reads; it writes none of its own.
    sinks : array [num_heads], optional
        One more logit of each head, without a value.

    Raises
    ------
    ValueError
        Heads, slopes or sinks that do not fit each other; an unknown cache type.
    NotImplementedError
        An encoder with an fp8 cache: it has no cache.
    """

    can_return_lse_for_decode: ClassVar[bool] = True
    supports_quant_query_input: ClassVar[bool] = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Sequence[float] | Array | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: AttentionType | str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Array = None,
    ) -> None:
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be a positive multiple of num_kv_heads={num_kv_heads}"
            )
        for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if per_head is not None and len(per_head) != num_heads:
                raise ValueError(f"{name} has {len(per_head)} entries; num_heads={num_heads}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.alibi_slopes, self.sinks = num_kv_heads, alibi_slopes, sinks
        self.attn_type = AttentionType(attn_type)
        self.sliding_window = sliding_window_of(sliding_window, self.attn_type)
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.fp8 = "" if kv_cache_dtype in _PLAIN else parse_fp8(kv_cache_dtype).name
        if self.fp8 and self.attn_type in UNCACHED:
            raise NotImplementedError(
                f"kv_cache_dtype={kv_cache_dtype!r}: {self.attn_type.value} layers have no cache; "
                "use 'auto'"
            )
        self._slopes: dict[Any, Array] = {}

    def forward(
        self,
        layer: AttentionLayer,
        query: Array,
        key: Array,
        value: Array,
        kv_cache: Array,
        attn_metadata: FlashAttentionMetadata | None,
        output: Array,
        output_scale: Array = None,
        output_block_scale: Array = None,
    ) -> Any:
        """Attention of a step's tokens over the cache, which holds their keys already.

        Parameters
        ----------
        layer : AttentionLayer
            Its scales are read for 8-bit operands only.
        query : array [tokens, num_heads, head_size]
            Rows past ``num_actual_tokens`` are padding.
        key, value : array [tokens, num_kv_heads, head_size] or None
            Read by encoder layers, which have no cache, and under context parallelism, where
            most of them are in other ranks' caches.
        kv_cache : array
            As `split_kv_cache` takes it; encoder layers do not read it.
        attn_metadata : FlashAttentionMetadata or None
            None = a profiling run: the output is 0.
        output : array [tokens, num_heads, head_size]
            Written in place; padding rows are left as they are.
        output_scale, output_block_scale
            Must be None: the output is not quantised here.

        Returns
        -------
        output : array [tokens, num_heads, head_size]
        lse : array [num_heads, num_actual_tokens], float32
            Only with ``need_to_return_lse_for_decode``.

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            As `flash_attn_varlen_func`; or an option that the backend does not have.
        """
        self._check_place(query)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: attention writes 16 bit; quantise its output")
        if attn_metadata is None:
            output[...] = 0
            return output
        for name, array in (("query", query), ("output", output)):
            if len(getattr(array, "shape", ())) != 3:
                raise ValueError(f"{name} must be an array [tokens, num_heads, head_size]")
        self._refuse(attn_metadata)
        if self.attn_type in UNCACHED:
            found = forward_encoder(self, query, key, value, output, attn_metadata)
        elif attn_metadata.dcp_context_kv_lens is not None:
            found = forward_dcp(self, layer, query, key, value, kv_cache, output, attn_metadata)
        else:
            found = self._forward_cached(layer, query, kv_cache, output, attn_metadata)
        return (output, found) if self.need_to_return_lse_for_decode else output

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Array, value: Array, kv_cache: Array, slot_mapping: Array
    ) -> None:
        """Store keys and values at their slots.

        Encoder layers have no cache, and a layer that shares another's must not write it: both
        return at once. So do steps without new keys (``key`` None, in cross attention).

        Parameters
        ----------
        layer : AttentionLayer
        key, value : array [tokens, num_kv_heads, head_size] or None
            Rows past the last slot are padding.
        kv_cache : array
        slot_mapping : array, int32 or int64

        Raises
        ------
        TypeError, ValueError
            As `reshape_and_cache_flash`.
        """
        unwritten = self.attn_type in UNCACHED or self.kv_sharing_target_layer_name is not None
        if unwritten or key is None:
            return
        caches = split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
        scales = (layer._k_scale, layer._v_scale) if self.fp8 else (1.0, 1.0)
        reshape_and_cache_flash(key, value, *caches, slot_mapping, self.kv_cache_dtype, *scales)

    def _check_place(self, query: Array) -> None:
        """Refuse arrays that are not where this backend computes; here the arrays decide."""

    def _refuse(self, metadata: FlashAttentionMetadata) -> None:
        if metadata.dcp_context_kv_lens is not None:
            check_has_group(metadata.dcp_group)
        if metadata.use_cascade and self.need_to_return_lse_for_decode:
            raise NotImplementedError(
                "a shared prefix returns no LSE; build with common_prefix_len=0"
            )

    def _forward_cached(
        self,
        layer: AttentionLayer,
        query: Array,
        kv_cache: Array,
        output: Array,
        step: FlashAttentionMetadata,
    ) -> Array:
        """The LSE, where it is wanted."""
        caches = split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
        requests = step.seq_lens.shape[0]
        scales = descale_arguments(layer, query, self.fp8, requests, self.num_kv_heads)
        if step.use_cascade:
            forward_cascade(self, query, caches, output, step, scales)
            return None
        tokens = slice(0, step.num_actual_tokens)
        found = flash_attn_varlen_func(
            query[tokens],
            *caches,
            step.max_query_len,
            step.query_start_loc,
            step.max_seq_len,
            seqused_k=step.seq_lens,
            softmax_scale=self.scale,
            causal=step.causal,
            window_size=symmetrize_window(self.sliding_window, step.causal),
            softcap=self.logits_soft_cap,
            alibi_slopes=self.slopes_for(query),
            block_table=step.block_table,
            return_softmax_lse=self.need_to_return_lse_for_decode,
            out=output[tokens],
            scheduler_metadata=step.scheduler_metadata,
            num_splits=step.max_num_splits,
            s_aux=self.sinks,
            batch_invariant=step.batch_invariant,
            **scales,
        )
        return found[1] if self.need_to_return_lse_for_decode else None

    def slopes_for(self, query: Array) -> Array:
        """The ALiBi slopes as an array beside the query, made once a device."""
        if self.alibi_slopes is None or hasattr(self.alibi_slopes, "dtype"):
            return self.alibi_slopes
        xp = array_module(query)
        place = (xp.__name__, None if xp is np else query.device.id)
        if place not in self._slopes:
            self._slopes[place] = xp.asarray(np.asarray(self.alibi_slopes, np.float32))
        return self._slopes[place]
