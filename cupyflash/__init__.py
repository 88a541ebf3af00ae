"""Attention for LLM inference on CuPy and NumPy arrays."""

from .attention import flash_attn_varlen_func
from .batched import flash_attn_func
from .bounds import AttentionBounds
from .cascade import cascade_attention
from .cascade_policy import shared_prefix_pays, use_cascade_attention
from .explain import Explanation, explain
from .fa_version import (
    fa_version,
    fa_version_unsupported_reason,
    flash_attn_supports_fp8,
    get_flash_attn_version,
    get_fp8_dtype_for_flashattn,
    is_fa_version_supported,
)
from .kv_append import flash_attn_with_kvcache
from .kv_cache import reshape_and_cache_flash
from .latent_cache import concat_and_cache_mla, gather_latent_cache
from .merge import merge_attn_states
from .mla import ContextChunk, mla_decode, mla_prefill
from .prefix_search import find_prefix_tree
from .prefix_tree import PrefixTree, prefix_tree
from .quantize import quantize_fp8
from .runtime.workspace import free_workspaces
from .scheduler_metadata import SchedulerMetadata, get_scheduler_metadata
from .shared_prefix import PrefixSchedule, get_prefix_schedule
from .side_stream import SideStream
from .warmup import warmup, workspace_size

__all__ = [
    "AttentionBounds",
    "ContextChunk",
    "Explanation",
    "PrefixSchedule",
    "PrefixTree",
    "SchedulerMetadata",
    "SideStream",
    "cascade_attention",
    "concat_and_cache_mla",
    "explain",
    "fa_version",
    "fa_version_unsupported_reason",
    "find_prefix_tree",
    "flash_attn_func",
    "flash_attn_supports_fp8",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "free_workspaces",
    "gather_latent_cache",
    "get_flash_attn_version",
    "get_fp8_dtype_for_flashattn",
    "get_prefix_schedule",
    "get_scheduler_metadata",
    "is_fa_version_supported",
    "merge_attn_states",
    "mla_decode",
    "mla_prefill",
    "prefix_tree",
    "quantize_fp8",
    "reshape_and_cache_flash",
    "shared_prefix_pays",
    "use_cascade_attention",
    "warmup",
    "workspace_size",
]

__version__ = "0.1.0"
