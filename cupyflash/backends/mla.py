"""The backend of multi-head latent attention."""

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
from cupyflash.runtime.dtypes import BF16, E4M3, FP16, FP32, ScalarType, parse_scalar_type
from cupyflash.support import Need

from .mla_builder import MLAMetadataBuilder
from .mla_impl import MLAImpl

__all__ = ["MLABackend"]

_LARGEST_LATENT, _LARGEST_ROPE = 512, 64
_MISSING = {
    "has_sink": "latent attention has no sinks",
    "has_sliding_window": "latent attention has no sliding window",
    "use_alibi": "latent attention has no ALiBi",
    "use_per_head_quant_scales": "a latent cache has no heads to scale",
    "use_sparse": "there is no sparse attention",
    "use_mm_prefix": "bidirectional ranges in a causal mask are not available",
    "use_rswa": "there is no reference sliding window",
}


class MLABackend(AttentionBackend):
    """Latent attention of decoders over a paged cache: NVIDIA GPUs, and NumPy arrays."""

    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[tuple[ScalarType, ...]] = (FP16, BF16)
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = (
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3",
    )  # fmt: skip
    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        return MLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """[num_blocks, block_size, head_size]: the latent part of each token, then its rope part.

        Raises
        ------
        ValueError
            More than one KV head, or a block size that is not a multiple of 16.
        """
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads={num_kv_heads}: a latent cache has 1, for all heads")
        if block_size < 1 or block_size % 16:
            nearest = max(16, -(-block_size // 16) * 16)
            raise ValueError(
                f"block_size={block_size} must be a multiple of 16; the nearest is {nearest}"
            )
        return (num_blocks, block_size, head_size)

    @classmethod
    def validate_configuration(
        cls, config: AttentionSelectorConfig, device_capability: tuple[int, int] | None
    ) -> list[str]:
        """Every reason why this backend cannot serve the configuration; empty = it can."""
        reasons = [] if config.use_mla else ["it is for latent attention, and use_mla is not set"]
        reasons += [text for name, text in _MISSING.items() if getattr(config, name)]
        largest = _LARGEST_LATENT + _LARGEST_ROPE
        if config.head_size % 8 or not _LARGEST_ROPE < config.head_size <= largest:
            reasons.append(
                f"head_size={config.head_size} is not a multiple of 8 from {_LARGEST_ROPE + 8} to "
                f"{largest} (latent and rope part)"
            )
        if config.attn_type != AttentionType.DECODER:
            reasons.append(f"attn_type={config.attn_type!r} is not decoder")
        if not cls.supports_block_size(config.block_size):
            reasons.append(f"block_size={config.block_size} is not a multiple of 16")
        types = cls._type_reasons(config, device_capability)
        reasons += types
        if device_capability is not None and device_capability < (8, 0):
            reasons.append("compute capability {}.{} is below 8.0".format(*device_capability))
        elif device_capability is not None and not types:
            reasons += cls._device_reasons(config, device_capability)
        return reasons

    @staticmethod
    def _device_reasons(config: AttentionSelectorConfig, capability: tuple[int, int]) -> list[str]:
        kind = parse_scalar_type(config.dtype)
        stored = kv_storage_type(config.kv_cache_dtype, config.dtype)
        need = Need(_LARGEST_ROPE, _LARGEST_LATENT, kind, stored, latent=True)
        try:
            resolve_need(need, capability)
        except (ValueError, NotImplementedError) as error:
            return [str(error)]
        return []

    @classmethod
    def _type_reasons(
        cls, config: AttentionSelectorConfig, capability: tuple[int, int] | None
    ) -> list[str]:
        allowed = cls.supported_dtypes if capability else (*cls.supported_dtypes, FP32)
        try:
            kind: Any = parse_scalar_type(config.dtype)
        except (TypeError, ValueError):
            kind = None
        if kind not in allowed:
            names = ", ".join(each.name for each in allowed)
            return [f"dtype={config.dtype} is not one of {names}"]
        try:
            stored: Any = kv_storage_type(config.kv_cache_dtype, config.dtype)
        except ValueError:
            stored = None
        if stored not in (kind, E4M3):
            return [
                f"kv_cache_dtype={config.kv_cache_dtype!r} is neither the model's nor e4m3; use "
                "'auto' or 'fp8'"
            ]
        return []
