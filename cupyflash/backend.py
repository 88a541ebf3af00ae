"""What an engine plugs in: a backend, its metadata builder, and its implementation of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from .backend_config import (
    AttentionSelectorConfig,
    AttentionType,
    BackendConfig,
    KVCacheSpec,
    MultipleOf,
)
from .common_metadata import CommonAttentionMetadata
from .runtime.dtypes import ScalarType

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "AttentionSelectorConfig",
    "AttentionType",
    "BackendConfig",
    "CommonAttentionMetadata",
    "KVCacheSpec",
    "MultipleOf",
]

Array = Any  # NumPy or CuPy
M = TypeVar("M")


class AttentionCGSupport(IntEnum):
    """Which steps a CUDA graph may hold; larger is more."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Steps in which every request has one query token."""
    UNIFORM_BATCH = 2
    """Steps in which every request has the same number of query tokens."""
    ALWAYS = 3

    @property
    def label(self) -> str:
        """``"always"``, ``"uniform"`` or ``"never"``."""
        if self is AttentionCGSupport.ALWAYS:
            return "always"
        return "never" if self is AttentionCGSupport.NEVER else "uniform"


class AttentionLayer(Protocol):
    """What an implementation reads of the layer that calls it.

    A scale is a number or a float32 array, one element or one a KV head; the real value is the
    stored one times it.
    """

    _q_scale: Any
    _k_scale: Any
    _v_scale: Any


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns an engine's step into what the layers of one KV cache group need.

    Parameters
    ----------
    kv_cache_spec : KVCacheSpec
    layer_names : sequence of str
        The group's layers; keys of ``config.layers``.
    config : BackendConfig
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: ClassVar[bool] = False

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str], config: BackendConfig
    ) -> None:
        missing = [name for name in layer_names if name not in config.layers]
        if missing:
            raise ValueError(f"layers {missing} are not in config.layers")
        self.kv_cache_spec, self.config = kv_cache_spec, config
        self.layer_names = tuple(layer_names)

    @classmethod
    def get_cudagraph_support(cls) -> AttentionCGSupport:
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """Metadata of a step.

        Parameters
        ----------
        common_prefix_len : int
            Tokens that all requests share and that are to be read once; 0 = none.
        common_attn_metadata : CommonAttentionMetadata
        fast_build : bool
            Spend as little as possible here, where few layers will use it.
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Metadata of a step that will be captured; later builds reuse its arrays."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """Metadata of step ``draft_index`` of a draft model."""
        del draft_index
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_block_table(self, metadata: M, blk_table: Array, slot_mapping: Array) -> M:
        """The metadata of another group with the same spec: other blocks, all else equal."""
        raise NotImplementedError(f"{type(self).__name__} builds every group's metadata anew")

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Sequence[int],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether a shared prefix should be read once; see `cupyflash.use_cascade_attention`."""
        return False


class AttentionImpl(ABC, Generic[M]):
    """One layer's attention."""

    can_return_lse_for_decode: ClassVar[bool] = False
    supports_quant_query_input: ClassVar[bool] = False
    """Beside an 8-bit cache the engine quantises queries to e4m3 before ``forward``: by
    ``layer._q_scale``, one for all or one a KV head, as `quantize_fp8` does it with ``scale=`` and
    ``granularity="tensor"`` or ``"group"``."""
    need_to_return_lse_for_decode: bool = False
    """Set by the engine: ``forward`` returns ``(output, lse)``."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: Array,
        key: Array,
        value: Array,
        kv_cache: Array,
        attn_metadata: M | None,
        output: Array,
        output_scale: Array = None,
        output_block_scale: Array = None,
    ) -> Any:
        """Attention of a step's tokens, written to ``output``."""

    @abstractmethod
    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Array, value: Array, kv_cache: Array, slot_mapping: Array
    ) -> None:
        """Store a step's keys and values; the engine calls it before ``forward``."""


class AttentionBackend(ABC):
    """A family of classes that belong together, and what it can do."""

    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[tuple[ScalarType, ...]]
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto",)
    forward_includes_kv_cache_update: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]: ...

    @classmethod
    @abstractmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]: ...

    @staticmethod
    @abstractmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]: ...

    @classmethod
    @abstractmethod
    def validate_configuration(
        cls, config: AttentionSelectorConfig, device_capability: tuple[int, int] | None
    ) -> list[str]:
        """Every reason why this backend cannot serve the configuration; empty = it can.

        Parameters
        ----------
        config : AttentionSelectorConfig
        device_capability : (int, int) or None
            None = NumPy arrays.
        """

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether blocks of this many tokens can be read; None = the backend may choose."""
        sizes = (
            size.base if isinstance(size, MultipleOf) else size
            for size in cls.get_supported_kernel_block_sizes()
        )
        # A larger block is a row of kernel blocks, so a multiple of a fixed size is fine too.
        return block_size is None or (
            block_size > 0 and any(block_size % size == 0 for size in sizes)
        )
