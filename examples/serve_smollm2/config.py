"""Sizes of the model, from the GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupyflash.backend import AttentionSelectorConfig

from .gguf_file import GGUFFile

__all__ = ["Config"]


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a Llama model."""

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
        if file["general.architecture"] != "llama":
            raise ValueError(f"architecture {file['general.architecture']!r} is not 'llama'")
        return cls(
            layers=file["llama.block_count"],
            hidden=file["llama.embedding_length"],
            heads=file["llama.attention.head_count"],
            kv_heads=file["llama.attention.head_count_kv"],
            head_dim=file["llama.rope.dimension_count"],
            context=file["llama.context_length"],
            rope_base=file["llama.rope.freq_base"],
            epsilon=file["llama.attention.layer_norm_rms_epsilon"],
        )

    def asked_of_attention(self, dtype: Any) -> AttentionSelectorConfig:
        """What the layers need, for `get_attn_backend`."""
        return AttentionSelectorConfig(head_size=self.head_dim, dtype=dtype)
