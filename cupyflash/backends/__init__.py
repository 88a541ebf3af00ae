"""Attention backends and how one is chosen."""

from .cross_attention import CrossAttentionBuilder
from .encoder_only import EncoderOnlyAttentionBuilder
from .flash_attn import FlashAttentionBackend
from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_impl import FlashAttentionImpl
from .flash_attn_metadata import FlashAttentionMetadata
from .local_attention import ChunkedLocalAttentionBuilder
from .mla import MLABackend
from .mla_builder import MLAMetadataBuilder
from .mla_impl import MLAImpl
from .mla_metadata import MLAMetadata
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
    "MLABackend",
    "MLAImpl",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "ReferenceBackend",
    "get_attn_backend",
    "unsupported_reasons",
]
