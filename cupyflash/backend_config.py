"""What an engine tells a backend once: its cache, its limits, and what it will ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .runtime.dtypes import ScalarType, parse_fp8, parse_scalar_type

__all__ = ["AttentionSelectorConfig", "AttentionType", "BackendConfig", "KVCacheSpec", "MultipleOf"]

_PLAIN = ("float16", "bfloat16", "float32", "half")


class AttentionType(str, Enum):
    """Which queries attend to which keys."""

    DECODER = "decoder"
    """Own tokens, through the cache."""
    ENCODER = "encoder"
    """The encoder of an encoder-decoder model: own tokens, both ways, no cache."""
    ENCODER_ONLY = "encoder_only"
    """A model that only encodes: own tokens, both ways, no cache."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross attention: decoder queries over cached encoder tokens."""


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Every positive multiple of ``base``."""

    base: int


def kv_storage_type(kv_cache_dtype: str, dtype: Any) -> ScalarType:
    """What a cache of this spelling holds, in a model of this dtype.

    Raises
    ------
    ValueError
        The spelling is unknown.
    """
    if kv_cache_dtype == "auto":
        return parse_scalar_type(dtype)
    if kv_cache_dtype in _PLAIN:
        return parse_scalar_type(kv_cache_dtype)
    return parse_fp8(kv_cache_dtype, "kv_cache_dtype")


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The cache of one group of layers.

    Attributes
    ----------
    block_size : int
        Tokens a block.
    num_kv_heads, head_size : int
    dtype : str or dtype
        Of the model.
    kv_cache_dtype : str
        ``"auto"`` (as the model), a 16-bit name, or an fp8 spelling.
    attention_chunk_size : int, optional
        Tokens of a chunk, where a query sees its own chunk only; whole blocks.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    kv_cache_dtype: str = "auto"
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.block_size, self.num_kv_heads, self.head_size)
        if min(sizes) < 1:
            raise ValueError(f"block_size, num_kv_heads, head_size = {sizes} must be at least 1")
        chunk = self.attention_chunk_size
        if chunk is not None and (chunk < 1 or chunk % self.block_size):
            nearest = max(1, -(-chunk // self.block_size)) * self.block_size
            raise ValueError(
                f"attention_chunk_size={chunk} must be whole blocks of {self.block_size} tokens; "
                f"the nearest is {nearest}"
            )
        kv_storage_type(self.kv_cache_dtype, self.dtype)

    @property
    def storage_type(self) -> ScalarType:
        return kv_storage_type(self.kv_cache_dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """The engine's limits and choices.

    Attributes
    ----------
    max_num_seqs : int
        Most requests of a step.
    layers : mapping of str to AttentionImpl
        Every attention layer of the model by name.
    full_cuda_graphs : bool
        Whole steps are captured; metadata then lies in arrays of fixed address.
    max_cudagraph_capture_size : int
        Most tokens of a captured step.
    max_num_splits_for_cuda_graph : int
        Bound of key splits in captured steps, so that their workspace has one size.
    batch_invariant : bool
        The bits of a request do not depend on its neighbours: no splits, no shared prefixes.
    dcp_world_size, dcp_rank, cp_kv_cache_interleave_size : int
        Decode context parallelism: ranks, this rank, neighbouring tokens on one rank.
    dcp_group : Communicator, optional
        Of these ranks; see `cupyflash.distributed`. Needed to attend, not to build metadata.
    dcp_combine : {"auto", "a2a", "ag", "ag_rs"}
        How states travel between ranks; see `cupyflash.distributed.combine_states`.
    cascade_policy : str
        ``"vllm"``: the rule of `use_cascade_attention`. ``"measured"``: `shared_prefix_pays`
        where the kernel of shared prefixes serves the layers (compute capability 9.0), else the
        same rule; a builder then leaves a prefix that does not pay unshared.
    """

    max_num_seqs: int
    layers: Mapping[str, Any] = field(default_factory=dict, compare=False)
    full_cuda_graphs: bool = False
    max_cudagraph_capture_size: int = 0
    max_num_splits_for_cuda_graph: int = 32
    batch_invariant: bool = False
    dcp_world_size: int = 1
    dcp_rank: int = 0
    cp_kv_cache_interleave_size: int = 1
    dcp_group: Any = field(default=None, compare=False)
    dcp_combine: str = "auto"
    cascade_policy: str = "vllm"

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_cudagraph_capture_size < 0:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} must be at least 1, "
                f"max_cudagraph_capture_size={self.max_cudagraph_capture_size} at least 0"
            )
        if self.max_num_splits_for_cuda_graph < 1:
            raise ValueError(
                f"max_num_splits_for_cuda_graph={self.max_num_splits_for_cuda_graph} must be at "
                "least 1"
            )
        if not 0 <= self.dcp_rank < self.dcp_world_size or self.cp_kv_cache_interleave_size < 1:
            raise ValueError(
                f"dcp_rank={self.dcp_rank} must be one of dcp_world_size={self.dcp_world_size}, "
                f"cp_kv_cache_interleave_size={self.cp_kv_cache_interleave_size} at least 1"
            )
        group, place = self.dcp_group, (self.dcp_rank, self.dcp_world_size)
        if group is not None and (group.rank, group.size) != place:
            raise ValueError(
                f"dcp_group has rank {group.rank} of {group.size}, but dcp_rank={self.dcp_rank} "
                f"and dcp_world_size={self.dcp_world_size}"
            )
        if self.dcp_combine not in ("auto", "a2a", "ag", "ag_rs"):
            raise ValueError(
                f"dcp_combine={self.dcp_combine!r}; use 'auto', 'a2a', 'ag' or 'ag_rs'"
            )
        if self.cascade_policy not in ("vllm", "measured"):
            raise ValueError(f"cascade_policy={self.cascade_policy!r}; use 'vllm' or 'measured'")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSelectorConfig:
    """What the layers of a model will ask of a backend.

    Attributes
    ----------
    head_size : int
    dtype : str or dtype
        Of the model.
    kv_cache_dtype : str
    block_size : int, optional
        None = the backend may choose.
    attn_type : AttentionType
    use_mla, has_sink, has_sliding_window, use_alibi, use_non_causal : bool
    use_per_head_quant_scales, use_batch_invariant, use_dcp : bool
    use_sparse, use_mm_prefix, use_rswa : bool
        Sparse attention, bidirectional image ranges in a causal mask, reference sliding window.
    """

    head_size: int
    dtype: Any
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    attn_type: AttentionType = AttentionType.DECODER
    use_mla: bool = False
    has_sink: bool = False
    has_sliding_window: bool = False
    use_alibi: bool = False
    use_non_causal: bool = False
    use_per_head_quant_scales: bool = False
    use_batch_invariant: bool = False
    use_dcp: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_rswa: bool = False
