"""Attention for LLM inference on CuPy and NumPy arrays."""

from .attention import flash_attn_func, flash_attn_varlen_func
from .cascade import cascade_attention, merge_attn_states, use_cascade_attention
from .fa_version import (
    fa_version,
    fa_version_unsupported_reason,
    flash_attn_supports_fp8,
    get_flash_attn_version,
    get_fp8_dtype_for_flashattn,
    is_fa_version_supported,
)
from .kv_cache import flash_attn_with_kvcache, reshape_and_cache_flash
from .scheduler_metadata import SchedulerMetadata, get_scheduler_metadata

__all__ = [
    "SchedulerMetadata",
    "cascade_attention",
    "fa_version",
    "fa_version_unsupported_reason",
    "flash_attn_func",
    "flash_attn_supports_fp8",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_flash_attn_version",
    "get_fp8_dtype_for_flashattn",
    "get_scheduler_metadata",
    "is_fa_version_supported",
    "merge_attn_states",
    "reshape_and_cache_flash",
    "use_cascade_attention",
]

__version__ = "0.1.0"
