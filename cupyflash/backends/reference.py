"""The NumPy backend: no GPU, float32 too, any block size."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from cupyflash.backend import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    MultipleOf,
)
from cupyflash.runtime.dtypes import BF16, FP16, FP32, ScalarType

from .flash_attn import FlashAttentionBackend
from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_impl import FlashAttentionImpl

__all__ = ["ReferenceBackend"]


class ReferenceMetadataBuilder(FlashAttentionMetadataBuilder):
    """Metadata on NumPy arrays; there are no graphs to capture."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class ReferenceImpl(FlashAttentionImpl):
    """One layer on NumPy arrays; others are a TypeError."""

    def _check_place(self, query: Any) -> None:
        if not isinstance(query, np.ndarray):
            raise TypeError(
                f"query is {type(query).__module__}.{type(query).__name__}; the REFERENCE backend "
                "computes NumPy arrays, FLASH_ATTN those on a GPU"
            )


class ReferenceBackend(FlashAttentionBackend):
    """What `FlashAttentionBackend` does, on the CPU."""

    supported_dtypes: ClassVar[tuple[ScalarType, ...]] = (FP32, FP16, BF16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = (
        *FlashAttentionBackend.supported_kv_cache_dtypes,
        "float32",
    )

    @staticmethod
    def get_name() -> str:
        return "REFERENCE"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return ReferenceImpl

    @staticmethod
    def get_builder_cls() -> type[ReferenceMetadataBuilder]:
        return ReferenceMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        return capability is None

    @classmethod
    def _device_reasons(
        cls,
        config: AttentionSelectorConfig,
        capability: tuple[int, int] | None,
        unknown: bool,
    ) -> list[str]:
        if capability is None:
            return []
        return ["arrays are on a GPU; REFERENCE computes NumPy arrays"]
