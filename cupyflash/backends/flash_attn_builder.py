"""From an engine's step to the metadata of `FlashAttentionImpl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from cupyflash.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.distributed.sharding import Sharding
from cupyflash.scheduler_metadata import SchedulerMetadata, get_scheduler_metadata

from .common_prefix import check_common_prefix
from .dcp import check_ranks_agree, local_contexts
from .flash_attn_metadata import FlashAttentionMetadata
from .graph_buffers import GraphBuffers
from .layer_group import LayerGroup
from .prefix_sharing import PrefixSharing
from .window import symmetrize_window

__all__ = ["FlashAttentionMetadataBuilder"]

Array = Any  # NumPy or CuPy


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[FlashAttentionMetadata]):
    """Metadata for `FlashAttentionImpl`, in the array module of each step's arrays.

    A schedule is made once a step where all layers of the group can share it: same window, same
    soft cap or none, no ``batch_invariant``, and no ``fast_build``.

    Parameters
    ----------
    kv_cache_spec : KVCacheSpec
    layer_names : sequence of str
    config : BackendConfig

    Raises
    ------
    ValueError
        Layers that are not in ``config.layers``, or that differ in their number of heads, or in
        whether their cache is dealt over ranks; an interleave that does not divide a block.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str], config: BackendConfig
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, config)
        self.group = LayerGroup.of([config.layers[name] for name in self.layer_names], config)
        self.aot_schedule = self.group.one_schedule and not config.batch_invariant
        self._prefix = PrefixSharing(kv_cache_spec, self.group, config, self.aot_schedule)
        ranks, every = config.dcp_world_size, config.cp_kv_cache_interleave_size
        self._ranks, every = (ranks, every) if self.group.sharded else (1, 1)
        self._sharding = Sharding(self._ranks, every, kv_cache_spec.block_size)
        self._buffers = GraphBuffers(max(config.max_num_seqs, config.max_cudagraph_capture_size))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """Metadata of a step; never synchronises.

        Parameters
        ----------
        common_prefix_len : int
            Tokens that all requests share and that are read once: whole blocks, none of them
            written in this step. 0 = no cascade. Needs host copies of the lengths.
        common_attn_metadata : CommonAttentionMetadata
        fast_build : bool
            Make no schedule.

        Returns
        -------
        FlashAttentionMetadata

        Raises
        ------
        ValueError
            A shared prefix that cannot be, or that the group's layers cannot take; metadata that
            outgrew what a graph was captured with.
        """
        common = common_attn_metadata
        aot = self.aot_schedule and not fast_build
        step = FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            max_num_splits=self._max_num_splits(common, aot),
            causal=bool(common.causal),
            batch_invariant=self.config.batch_invariant,
        )
        if common_prefix_len and self._prefix.pays(common_prefix_len, common):
            return self._with_cascade(step, common, common_prefix_len, aot)
        if self.group.sharded:
            return self._with_context_parallel(step, common, aot)
        if not aot:
            return step
        keys = (step.seq_lens, step.max_seq_len, step.causal)
        schedule = self._schedule("scheduler_metadata", step, self._queries(step), keys)
        return replace(step, scheduler_metadata=schedule)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Metadata of a step that will be captured: its arrays stay where they are.

        Raises
        ------
        ValueError
            The config announces no graphs, or none of this size.
        """
        tokens = common_attn_metadata.num_actual_tokens
        if not self._in_graph(tokens):
            raise ValueError(
                f"a graph of {tokens} tokens, but the config has "
                f"full_cuda_graphs={self.config.full_cuda_graphs} and "
                f"max_cudagraph_capture_size={self.config.max_cudagraph_capture_size}"
            )
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        self._buffers.captured()
        return found

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: Array, slot_mapping: Array
    ) -> FlashAttentionMetadata:
        """The metadata of this group from that of another with the same spec.

        Parameters
        ----------
        metadata : FlashAttentionMetadata
            Left as it is.
        blk_table : array [R, max_blocks], int32
        slot_mapping : array, int32 or int64

        Returns
        -------
        FlashAttentionMetadata
        """
        if metadata.map_block_table is not None:
            blk_table = metadata.map_block_table(blk_table)
        found = replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)
        made, of_prefix = found.scheduler_metadata, found.prefix_scheduler_metadata
        if (made is None and of_prefix is None) or (made is not None and self._can_use(made)):
            return found
        return replace(found, scheduler_metadata=None, prefix_scheduler_metadata=None)

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
        """By the policy of the config, and False where this group cannot."""
        return self._prefix.may_pay(
            common_prefix_len, query_lens, num_query_heads, num_kv_heads, use_alibi,
            use_sliding_window, use_local_attention, num_sms, dcp_world_size,
        )  # fmt: skip

    def _in_graph(self, tokens: int) -> bool:
        config = self.config
        return config.full_cuda_graphs and tokens <= config.max_cudagraph_capture_size

    def _max_num_splits(self, common: CommonAttentionMetadata, aot: bool) -> int:
        if self.config.batch_invariant:
            return 1
        if aot and self._in_graph(common.num_actual_tokens):
            return self.config.max_num_splits_for_cuda_graph
        return 0

    @staticmethod
    def _queries(step: FlashAttentionMetadata) -> tuple[Array, int]:
        return step.query_start_loc, step.max_query_len

    def _schedule(
        self,
        name: str,
        step: FlashAttentionMetadata,
        queries: tuple[Array, int],
        keys: tuple[Array, int, bool],
        num_heads_q: int | None = None,
    ) -> SchedulerMetadata:
        """For (starts, bound) of the queries and (lengths, bound, causal) of the keys."""
        spec = self.kv_cache_spec
        (starts, max_query_len), (lengths, max_len, causal) = queries, keys
        made = get_scheduler_metadata(
            lengths.shape[0],
            max_query_len,
            max_len,
            num_heads_q or self.group.num_heads_q,
            spec.num_kv_heads,
            spec.head_size,
            lengths,
            spec.storage_type.name,
            cu_seqlens_q=starts,
            page_size=spec.block_size,
            causal=causal,
            window_size=symmetrize_window(self.group.sliding_window, causal),
            has_softcap=self.group.has_softcap,
            num_splits=step.max_num_splits,
        )
        if self._in_graph(step.num_actual_tokens):
            return self._buffers.schedule(name, made)
        return made

    def _can_use(self, schedule: SchedulerMetadata) -> bool:
        """Whether a schedule of another group with the same spec fits this group's layers."""
        bounds, group = schedule.bounds, self.group
        causal = bounds.window_right == 0
        left, right = symmetrize_window(group.sliding_window, causal)
        return self.aot_schedule and (
            (bounds.has_softcap, bounds.num_heads_q, bounds.window_left)
            == (group.has_softcap, group.num_heads_q * self._ranks, left)
            and bounds.window_right == (0 if causal else right)
        )

    def _rows(self, name: str, values: Array, tokens: int) -> Array:
        return self._buffers.rows(name, values) if self._in_graph(tokens) else values

    def _with_cascade(
        self, step: FlashAttentionMetadata, common: CommonAttentionMetadata, prefix: int, aot: bool
    ) -> FlashAttentionMetadata:
        reason = self.group.no_cascade or ("" if common.causal else "attention is not causal")
        if reason:
            raise ValueError(f"common_prefix_len={prefix}, but {reason}; use 0")
        starts = common.on_host("query_start_loc")
        check_common_prefix(
            prefix, np.diff(starts), common.on_host("seq_lens"), self.kv_cache_spec.block_size
        )
        xp, tokens, padded = common.xp, int(starts[-1]), common.num_actual_tokens
        # A padded request has no keys; its suffix must not have fewer than none.
        suffix = xp.maximum(common.seq_lens - np.int32(prefix), np.int32(0))
        query_lens = xp.asarray(np.array([0, tokens], np.int32))
        prefix_lens = xp.asarray(np.array([prefix], np.int32))
        found = replace(
            step,
            use_cascade=True,
            common_prefix_len=prefix,
            num_cascade_tokens=tokens,
            cu_prefix_query_lens=self._rows("cu_prefix_query_lens", query_lens, padded),
            prefix_kv_lens=self._rows("prefix_kv_lens", prefix_lens, padded),
            suffix_kv_lens=self._rows("suffix_kv_lens", suffix, padded),
        )
        if not aot:
            return found
        made = None if self._in_graph(padded) else self._prefix.schedule(found, prefix, tokens)
        if made is not None:
            return replace(found, prefix_scheduler_metadata=made)
        keys = found.suffix_kv_lens, found.max_seq_len - prefix, True
        own = self._schedule("scheduler_metadata", found, self._queries(found), keys)
        rows, keys = (found.cu_prefix_query_lens, tokens), (found.prefix_kv_lens, prefix, False)
        shared = self._schedule("prefix_scheduler_metadata", found, rows, keys)
        return replace(found, scheduler_metadata=own, prefix_scheduler_metadata=shared)

    def _with_context_parallel(
        self, step: FlashAttentionMetadata, common: CommonAttentionMetadata, aot: bool
    ) -> FlashAttentionMetadata:
        group, captured = self.config.dcp_group, self._in_graph(step.num_actual_tokens)
        if group is not None:
            layers = self.group.num_heads_q, self.group.has_softcap, step.max_num_splits
            alike = (*layers, step.causal, step.batch_invariant)
            check_ranks_agree(group, self.kv_cache_spec, alike, common)
        local, longest = local_contexts(self._sharding, self.config.dcp_rank, common, captured)
        found = replace(
            step,
            dcp_context_kv_lens=self._rows("dcp_context_kv_lens", local, step.num_actual_tokens),
            max_dcp_context_kv_len=longest,
            dcp_group=group,
            dcp_combine=self.config.dcp_combine,
        )
        if not (aot and longest):
            return found
        keys = (found.dcp_context_kv_lens, longest, False)
        schedule = self._schedule(
            "scheduler_metadata", found, self._queries(found), keys,
            self.group.num_heads_q * self._ranks,
        )  # fmt: skip
        return replace(found, scheduler_metadata=schedule)
