"""The passes of a layer that are not one call over its own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.backend import AttentionLayer
from cupyflash.cascade import cascade_attention
from cupyflash.distributed.attention import context_parallel_attention

from .descales import descale_arguments
from .flash_attn_metadata import FlashAttentionMetadata
from .kv_layout import split_kv_cache

if TYPE_CHECKING:
    from .flash_attn_impl import FlashAttentionImpl

__all__ = ["forward_cascade", "forward_dcp", "forward_encoder"]

Array = Any  # NumPy or CuPy


def forward_cascade(
    impl: FlashAttentionImpl,
    query: Array,
    caches: tuple[Array, Array],
    output: Array,
    step: FlashAttentionMetadata,
    scales: dict[str, Any],
) -> None:
    """Over a prefix that is read once for all requests, and over each one's own keys."""
    tokens = slice(0, step.num_cascade_tokens)
    cascade_attention(
        output[tokens],
        query[tokens],
        *caches,
        step.query_start_loc,
        step.max_query_len,
        step.cu_prefix_query_lens,
        step.prefix_kv_lens,
        step.suffix_kv_lens,
        step.max_seq_len,
        impl.scale,
        impl.slopes_for(query),
        impl.sliding_window,
        impl.logits_soft_cap,
        step.block_table,
        step.common_prefix_len,
        step.max_num_splits,
        None,
        step.prefix_scheduler_metadata,
        step.scheduler_metadata,
        s_aux=impl.sinks,
        **scales,
    )


def forward_dcp(
    impl: FlashAttentionImpl,
    layer: AttentionLayer,
    query: Array,
    key: Array,
    value: Array,
    kv_cache: Array,
    output: Array,
    step: FlashAttentionMetadata,
) -> Array:
    """Over a context on many ranks; the LSE, where it is wanted."""
    if key is None or query.dtype.itemsize == 1:
        given = "key is None" if key is None else f"query is {query.dtype}"
        raise NotImplementedError(
            f"{given}: under context parallelism new tokens attend to each other without the "
            "cache; pass their keys, and queries of the same 16-bit type"
        )
    caches = split_kv_cache(kv_cache, impl.num_kv_heads, impl.head_size)
    requests, tokens = step.seq_lens.shape[0], slice(0, step.num_actual_tokens)
    scales = descale_arguments(layer, query, impl.fp8, requests, impl.num_kv_heads)
    assert step.max_dcp_context_kv_len is not None
    _, lse = context_parallel_attention(
        step.dcp_group,
        query[tokens],
        key[tokens],
        value[tokens],
        *caches,
        cu_seqlens_q=step.query_start_loc,
        max_seqlen_q=step.max_query_len,
        context_lens=step.dcp_context_kv_lens,
        max_context_len=step.max_dcp_context_kv_len,
        block_table=step.block_table,
        softmax_scale=impl.scale,
        causal=step.causal,
        softcap=impl.logits_soft_cap,
        s_aux=impl.sinks,
        out=output[tokens],
        scheduler_metadata=step.scheduler_metadata,
        num_splits=step.max_num_splits,
        batch_invariant=step.batch_invariant,
        combine=step.dcp_combine,
        **scales,
    )
    return lse if impl.need_to_return_lse_for_decode else None


def forward_encoder(
    impl: FlashAttentionImpl,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    step: FlashAttentionMetadata,
) -> Array:
    """Own tokens both ways, without a cache; the LSE, where it is wanted."""
    tokens = slice(0, step.num_actual_tokens)
    found = flash_attn_varlen_func(
        query[tokens],
        key[tokens],
        value[tokens],
        step.max_query_len,
        step.query_start_loc,
        step.max_query_len,
        step.query_start_loc,
        softmax_scale=impl.scale,
        causal=False,
        window_size=impl.sliding_window,
        softcap=impl.logits_soft_cap,
        alibi_slopes=impl.slopes_for(query),
        return_softmax_lse=impl.need_to_return_lse_for_decode,
        out=output[tokens],
        num_splits=1 if step.batch_invariant else 0,
        s_aux=impl.sinks,
        batch_invariant=step.batch_invariant,
    )
    return found[1] if impl.need_to_return_lse_for_decode else None
