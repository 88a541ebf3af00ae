"""Chunked-local attention: each query sees its own chunk of the sequence, up to itself.

A request that reaches into several chunks becomes several requests, one a chunk, whose keys are
the chunk's blocks; plain causal attention over those is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cupyflash.backend import AttentionCGSupport, CommonAttentionMetadata
from cupyflash.runtime.arrays import array_module

from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_metadata import FlashAttentionMetadata

__all__ = ["ChunkedLocalAttentionBuilder", "VirtualBatches", "make_local_attention_virtual_batches"]

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class VirtualBatches:
    """Requests cut at the borders of chunks: V virtual ones, in the order of their queries.

    Attributes
    ----------
    query_start_loc : ndarray [V + 1], int32
    seq_lens : ndarray [V], int32
        Keys from the start of the chunk to the last one that exists.
    request : ndarray [V], int32
        The row of the engine's block table.
    first_block : ndarray [V], int32
        The column where the chunk starts.
    blocks_per_chunk : int
    """

    query_start_loc: Int32
    seq_lens: Int32
    request: Int32
    first_block: Int32
    blocks_per_chunk: int

    def block_table(self, block_table: Any) -> Any:
        """The virtual requests' table [V, blocks_per_chunk] from the engine's."""
        xp = array_module(block_table)
        columns = self.first_block[:, None] + np.arange(self.blocks_per_chunk, dtype=np.int32)
        # The last chunk's blocks that do not exist yet are never read; any column will do.
        columns = np.clip(columns, 0, max(block_table.shape[1] - 1, 0))
        return block_table[xp.asarray(self.request)[:, None], xp.asarray(columns)]


def make_local_attention_virtual_batches(
    attention_chunk_size: int, query_start_loc: Int32, seq_lens: Int32, block_size: int
) -> VirtualBatches:
    """Cut requests at the borders of chunks.

    Parameters
    ----------
    attention_chunk_size : int
        Tokens of a chunk; a multiple of the block size.
    query_start_loc : ndarray [R + 1], int32
        On the host. Requests without queries give no virtual ones.
    seq_lens : ndarray [R], int32
        On the host; keys of each request, this step's included.
    block_size : int

    Returns
    -------
    VirtualBatches

    Raises
    ------
    ValueError
        A chunk that is not whole blocks, or a request with fewer keys than queries.
    """
    chunk = attention_chunk_size
    if chunk < 1 or chunk % block_size:
        raise ValueError(
            f"attention_chunk_size={chunk} must be a positive multiple of block_size={block_size}"
        )
    queries = np.diff(query_start_loc)
    asking = np.flatnonzero(queries > 0)
    queries, lengths = queries[asking], seq_lens[asking]
    if (lengths < queries).any():
        short = int(asking[(lengths < queries).argmax()])
        raise ValueError(
            f"request {short} has {seq_lens[short]} keys, fewer than its queries; seq_lens counts "
            "this step's keys too"
        )
    first_chunk = (lengths - queries) // chunk
    counts = (lengths - 1) // chunk - first_chunk + 1
    owner = np.repeat(np.arange(len(asking)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = (first_chunk[owner] + nth) * chunk
    end = np.minimum(begin + chunk, lengths[owner])
    first_query = np.maximum(begin, (lengths - queries)[owner])
    return VirtualBatches(
        query_start_loc=np.concatenate([[0], np.cumsum(end - first_query)]).astype(np.int32),
        seq_lens=(end - begin).astype(np.int32),
        request=asking[owner].astype(np.int32),
        first_block=(begin // block_size).astype(np.int32),
        blocks_per_chunk=chunk // block_size,
    )


class ChunkedLocalAttentionBuilder(FlashAttentionMetadataBuilder):
    """Metadata for layers with chunked-local attention; ``attention_chunk_size`` of the spec.

    Needs host copies of ``query_start_loc`` and ``seq_lens``. The number of virtual requests
    changes from step to step, so no graph can hold it.

    Raises
    ------
    ValueError
        The spec has no ``attention_chunk_size``.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_cache_spec.attention_chunk_size is None:
            raise ValueError("kv_cache_spec.attention_chunk_size is None; chunks need a size")
        if self.config.dcp_world_size > 1:
            raise NotImplementedError(
                f"dcp_world_size={self.config.dcp_world_size}: chunks are cut from whole "
                "sequences; use 1"
            )
        self.group = replace(self.group, no_cascade="attention is local to chunks")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """Metadata of the virtual requests; tokens and slots are the step's own."""
        common = common_attn_metadata
        chunk, size = self.kv_cache_spec.attention_chunk_size, self.kv_cache_spec.block_size
        assert chunk is not None
        cut = make_local_attention_virtual_batches(
            chunk, common.on_host("query_start_loc"), common.on_host("seq_lens"), size
        )
        if not common.causal:
            raise NotImplementedError("causal=False: chunked-local attention is causal; use True")
        xp = common.xp
        virtual = replace(
            common,
            query_start_loc=xp.asarray(cut.query_start_loc),
            query_start_loc_cpu=cut.query_start_loc,
            seq_lens=xp.asarray(cut.seq_lens),
            seq_lens_cpu=cut.seq_lens,
            num_reqs=len(cut.seq_lens),
            max_query_len=int(np.diff(cut.query_start_loc).max(initial=0)),
            max_seq_len=int(cut.seq_lens.max(initial=0)),
            block_table_tensor=cut.block_table(common.block_table_tensor),
            encoder_seq_lens=None,
            encoder_seq_lens_cpu=None,
        )
        found = super().build(common_prefix_len, virtual, fast_build)
        return replace(found, map_block_table=cut.block_table)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Refused: see the class."""
        raise NotImplementedError(
            "chunked-local attention cannot be captured: its number of requests varies; run the "
            "step eagerly or capture it piecewise"
        )
