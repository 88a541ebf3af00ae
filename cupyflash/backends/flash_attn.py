"""The FlashAttention backend: paged attention on NVIDIA GPUs, and the same on NumPy arrays."""

from __future__ import annotations

from typing import Any, ClassVar

from cupyflash.backend import (
    AttentionBackend,
    AttentionSelectorConfig,
    AttentionType,
    MultipleOf,
)
from cupyflash.backend_config import kv_storage_type
from cupyflash.fa_version import resolve_need
from cupyflash.runtime.dtypes import BF16, FP16, ScalarType, parse_scalar_type
from cupyflash.support import Need

from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_impl import FlashAttentionImpl
from .kv_layout import kv_cache_stride_order

__all__ = ["FlashAttentionBackend"]

_LARGEST_HEAD_SIZE = 256
_MISSING = {
    "use_mla": "latent attention is FLASH_ATTN_MLA's",
    "use_sparse": "there is no sparse attention",
    "use_mm_prefix": "bidirectional ranges in a causal mask are not available",
    "use_rswa": "there is no reference sliding window",
}


class FlashAttentionBackend(AttentionBackend):
    """Attention of decoders, encoders and cross attention over paged caches."""

    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[tuple[ScalarType, ...]] = (FP16, BF16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = (
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType | str) -> bool:
        return attn_type in tuple(AttentionType)

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return FlashAttentionMetadataBuilder

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """[2, num_blocks, block_size, num_kv_heads, head_size]: keys, then values.

        Raises
        ------
        ValueError
            A block size that `get_supported_kernel_block_sizes` does not name.
        """
        if not cls.supports_block_size(block_size):
            size = cls.get_supported_kernel_block_sizes()[0]
            base = size.base if isinstance(size, MultipleOf) else size
            nearest = max(base, -(-block_size // base) * base)
            raise ValueError(
                f"block_size={block_size} must be a multiple of {base}; the nearest is {nearest}"
            )
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(layout: str = "NHD") -> tuple[int, ...]:
        """The axes of `get_kv_cache_shape` in memory order; see `kv_cache_stride_order`."""
        return kv_cache_stride_order(layout)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= _LARGEST_HEAD_SIZE

    @classmethod
    def supports_dtype(cls, dtype: Any) -> bool:
        try:
            return parse_scalar_type(dtype) in cls.supported_dtypes
        except (TypeError, ValueError):
            return False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        """Ampere and later; None = NumPy arrays."""
        return capability is None or capability >= (8, 0)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(
        cls, config: AttentionSelectorConfig, device_capability: tuple[int, int] | None
    ) -> list[str]:
        """Every reason why this backend cannot serve the configuration; empty = it can."""
        reasons = [text for name, text in _MISSING.items() if getattr(config, name)]
        if not cls.supports_head_size(config.head_size):
            reasons.append(
                f"head_size={config.head_size} is not a multiple of 8 from 8 to "
                f"{_LARGEST_HEAD_SIZE}"
            )
        if not cls.supports_dtype(config.dtype):
            names = ", ".join(kind.name for kind in cls.supported_dtypes)
            reasons.append(f"dtype={config.dtype} is not one of {names}")
        if not cls.supports_kv_cache_dtype(config.kv_cache_dtype):
            names = ", ".join(cls.supported_kv_cache_dtypes)
            reasons.append(f"kv_cache_dtype={config.kv_cache_dtype!r} is not one of {names}")
        if not cls.supports_block_size(config.block_size):
            sizes = ", ".join(map(str, cls.get_supported_kernel_block_sizes()))
            reasons.append(f"block_size={config.block_size} is not one of {sizes}")
        if not cls.supports_attn_type(config.attn_type):
            names = ", ".join(kind.value for kind in AttentionType)
            reasons.append(f"attn_type={config.attn_type!r} is not one of {names}")
        if not reasons:
            reasons = _combination(config)
        return reasons + cls._device_reasons(config, device_capability, bool(reasons))

    @classmethod
    def _device_reasons(
        cls,
        config: AttentionSelectorConfig,
        capability: tuple[int, int] | None,
        unknown: bool,
    ) -> list[str]:
        """Why the device cannot; ``unknown``: the configuration is not one to ask about."""
        if not cls.supports_compute_capability(capability):
            assert capability is not None
            major, minor = capability
            return [f"compute capability {major}.{minor} is below 8.0"]
        if capability is None or unknown:
            return []
        try:
            resolve_need(_need_of(config), capability)
        except (ValueError, NotImplementedError) as error:
            return [str(error)]
        return []


def _combination(config: AttentionSelectorConfig) -> list[str]:
    """Settings that are fine alone, but not together."""
    model, cache = parse_scalar_type(config.dtype), _storage(config)
    if not cache.is_fp8 and cache != model:
        return [
            f"kv_cache_dtype={config.kv_cache_dtype!r} under a model in {model.name}: use 'auto' "
            "or fp8"
        ]
    uncached = config.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
    if uncached and cache.is_fp8:
        return [f"{config.attn_type.value} layers have no cache; use kv_cache_dtype='auto'"]
    return []


def _storage(config: AttentionSelectorConfig) -> ScalarType:
    return kv_storage_type(config.kv_cache_dtype or "auto", config.dtype)


def _need_of(config: AttentionSelectorConfig) -> Need:
    return Need(
        head_dim=config.head_size,
        head_dim_v=config.head_size,
        q_type=parse_scalar_type(config.dtype),
        kv_type=_storage(config),
        alibi=config.use_alibi,
        sink=config.has_sink,
    )
