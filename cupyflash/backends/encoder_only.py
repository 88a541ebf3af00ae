"""Metadata for models that only encode."""

from __future__ import annotations

from dataclasses import replace

from cupyflash.backend import CommonAttentionMetadata

from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_metadata import FlashAttentionMetadata

__all__ = ["EncoderOnlyAttentionBuilder"]


class EncoderOnlyAttentionBuilder(FlashAttentionMetadataBuilder):
    """Metadata for encoder-only layers: every token sees every token of its sequence."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """As the base class, whatever ``causal`` the step names."""
        step = replace(common_attn_metadata, causal=False)
        return super().build(common_prefix_len, step, fast_build)
