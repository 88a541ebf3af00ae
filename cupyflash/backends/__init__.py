"""Attention backends and how one is chosen."""

from .cross_attention import CrossAttentionBuilder
from .encoder_only import EncoderOnlyAttentionBuilder
from .flash_attn import FlashAttentionBackend
from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_impl import FlashAttentionImpl
from .flash_attn_metadata import FlashAttentionMetadata
from .local_attention import ChunkedLocalAttentionBuilder
from .reference import ReferenceBackend
from .selector import get_attn_backend, unsupported_reasons

__all__ = [
    "ChunkedLocalAttentionBuilder",
    "CrossAttentionBuilder",
    "EncoderOnlyAttentionBuilder",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "ReferenceBackend",
    "get_attn_backend",
    "unsupported_reasons",
]
