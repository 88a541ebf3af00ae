"""From an engine's step to the metadata of `MLAImpl`."""

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

from .dcp import check_ranks_agree, local_contexts
from .graph_buffers import GraphBuffers
from .mla_metadata import MLAContext, MLADecode, MLAMetadata, MLAPrefill, MLARanks

__all__ = ["MLAMetadataBuilder"]

Array = Any  # NumPy or CuPy


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """Metadata for `MLAImpl`, in the array module of each step's arrays.

    The first requests of a step that have at most ``reorder_batch_threshold`` queries are computed
    over the latent cache; from the first longer one on, keys and values are expanded. Engines that
    put short requests first get the most out of it; any order is right. Where contexts are dealt
    over ranks, a step with a context is computed over the cache whole.

    Parameters
    ----------
    kv_cache_spec : KVCacheSpec
    layer_names : sequence of str
    config : BackendConfig

    Raises
    ------
    ValueError
        Layers that are not in ``config.layers``; a cache of more than one KV head; an interleave
        that does not divide a block.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: ClassVar[bool] = True
    reorder_batch_threshold: ClassVar[int] = 128
    context_chunk_tokens: int = 64 * 1024
    """Tokens of contexts that are expanded at a time."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str], config: BackendConfig
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, config)
        if kv_cache_spec.num_kv_heads != 1:
            raise ValueError(
                f"num_kv_heads={kv_cache_spec.num_kv_heads}: a latent cache has 1, for all heads"
            )
        ranks, every = config.dcp_world_size, config.cp_kv_cache_interleave_size
        self._sharding = Sharding(ranks, every if ranks > 1 else 1, kv_cache_spec.block_size)
        self._buffers = GraphBuffers(max(config.max_num_seqs, config.max_cudagraph_capture_size))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        """Metadata of a step; never synchronises.

        Parameters
        ----------
        common_prefix_len : int
            Must be 0: a latent row is read once for all heads, and not shared by requests.
        common_attn_metadata : CommonAttentionMetadata
            Needs host copies of the lengths where a request has more than
            ``reorder_batch_threshold`` queries.
        fast_build : bool
            No difference here.

        Returns
        -------
        MLAMetadata

        Raises
        ------
        ValueError
            A shared prefix, or a host copy that is missing.
        """
        if common_prefix_len:
            raise ValueError(
                f"common_prefix_len={common_prefix_len}: latent attention reads no shared prefix "
                "once; use 0"
            )
        common, decodes = common_attn_metadata, common_attn_metadata.num_reqs
        tokens = common.num_actual_tokens
        if common.max_query_len > self.reorder_batch_threshold:
            starts = common.on_host("query_start_loc")
            longer = np.diff(starts) > self.reorder_batch_threshold
            if longer.any():
                decodes = int(longer.argmax())
                tokens = int(starts[decodes])
        ranks = self._over_ranks(common) if self.config.dcp_world_size > 1 else None
        if ranks is not None:
            whole = ranks.max_context_len > 0
            decodes, tokens = (common.num_reqs, common.num_actual_tokens) if whole else (0, 0)
        return MLAMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            decode=self._decode(common, decodes, tokens, ranks) if decodes else None,
            prefill=self._prefill(common, decodes) if decodes < common.num_reqs else None,
            causal=bool(common.causal),
            batch_invariant=self.config.batch_invariant,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLAMetadata:
        """Metadata of a step that will be captured: decoding only.

        Raises
        ------
        ValueError
            A request with more queries than ``reorder_batch_threshold``.
        """
        longest = common_attn_metadata.max_query_len
        if longest > self.reorder_batch_threshold:
            raise ValueError(
                f"max_query_len={longest}: expanding a context depends on its length, so only "
                f"requests of at most {self.reorder_batch_threshold} queries can be captured"
            )
        found = self.build(0, common_attn_metadata)
        self._buffers.captured()
        return found

    def update_block_table(
        self, metadata: MLAMetadata, blk_table: Array, slot_mapping: Array
    ) -> MLAMetadata:
        """The metadata of another group with the same spec: other blocks, all else equal."""
        decode, prefill, first = metadata.decode, metadata.prefill, 0
        if decode is not None:
            first = decode.seq_lens.shape[0]
            decode = replace(decode, block_table=blk_table[:first])
        if prefill is not None:
            prefill = replace(prefill, block_table=blk_table[first:])
        return replace(metadata, decode=decode, prefill=prefill, slot_mapping=slot_mapping)

    def _over_ranks(self, common: CommonAttentionMetadata) -> MLARanks:
        config, tokens = self.config, common.num_actual_tokens
        if config.dcp_group is not None:
            heads = config.layers[self.layer_names[0]].num_heads
            alike = heads, bool(common.causal), config.batch_invariant
            check_ranks_agree(config.dcp_group, self.kv_cache_spec, alike, common)
        captured = config.full_cuda_graphs and tokens <= config.max_cudagraph_capture_size
        local, longest = local_contexts(self._sharding, config.dcp_rank, common, captured)
        if captured:
            local = self._buffers.rows("context_lens", local)
        return MLARanks(
            group=config.dcp_group,
            context_lens=local,
            max_context_len=longest,
            combine=config.dcp_combine,
        )

    def _decode(
        self, common: CommonAttentionMetadata, count: int, tokens: int, ranks: MLARanks | None
    ) -> MLADecode:
        longest = common.max_query_len
        return MLADecode(
            num_tokens=tokens,
            query_start_loc=common.query_start_loc[: count + 1],
            seq_lens=common.seq_lens[:count],
            block_table=common.block_table_tensor[:count],
            max_query_len=longest if ranks else min(longest, self.reorder_batch_threshold),
            max_seq_len=common.max_seq_len,
            ranks=ranks,
        )

    def _prefill(self, common: CommonAttentionMetadata, first: int) -> MLAPrefill:
        starts = common.on_host("query_start_loc")[first:]
        queries = np.diff(starts)
        contexts = np.where(queries > 0, common.on_host("seq_lens")[first:] - queries, 0)
        return MLAPrefill(
            query_start_loc=common.xp.asarray((starts - starts[0]).astype(np.int32)),
            block_table=common.block_table_tensor[first:],
            max_query_len=int(queries.max()),
            context=tuple(self._chunks(common.xp, contexts)),
        )

    def _chunks(self, xp: Any, contexts: np.ndarray[Any, Any]) -> list[MLAContext]:
        """Contexts cut at the same positions, so many tokens of each at a time as there is room."""
        longest = int(contexts.max(initial=0))
        if longest <= 0:
            return []
        block = self.kv_cache_spec.block_size
        room = self.context_chunk_tokens // int((contexts > 0).sum())
        step = max(block, room // block * block)
        chunks = []
        for begin in range(0, longest, step):
            lengths = np.clip(contexts - begin, 0, step)
            cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            chunks.append(
                MLAContext(
                    cu_seqlens=xp.asarray(cu_seqlens),
                    starts=xp.full(len(contexts), begin, np.int32),
                    num_tokens=int(cu_seqlens[-1]),
                    max_len=int(lengths.max()),
                )
            )
        return chunks
