"""Metadata for cross attention: decoder queries over an encoder's tokens in the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from cupyflash.backend import AttentionCGSupport, CommonAttentionMetadata

from .flash_attn_builder import FlashAttentionMetadataBuilder
from .flash_attn_metadata import FlashAttentionMetadata

__all__ = ["CrossAttentionBuilder", "encoder_slot_mapping"]


def encoder_slot_mapping(common: CommonAttentionMetadata, block_size: int) -> Any:
    """Where the encoder's tokens of a step's new requests go in the cache.

    A request is new if no earlier step computed a token of it; the others' encoder tokens are
    there already.

    Parameters
    ----------
    common : CommonAttentionMetadata
        With ``encoder_seq_lens``; host copies of all lengths are needed.
    block_size : int

    Returns
    -------
    array [encoder tokens of new requests], int64
    """
    queries = np.diff(common.on_host("query_start_loc"))
    new = (queries > 0) & (common.on_host("seq_lens") == queries)
    lengths = np.where(new, common.on_host("encoder_seq_lens"), 0)
    request = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(request)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    xp, table = common.xp, common.block_table_tensor
    blocks = table[xp.asarray(request), xp.asarray(position // block_size)]
    return blocks.astype(np.int64) * block_size + xp.asarray(position % block_size)


class CrossAttentionBuilder(FlashAttentionMetadataBuilder):
    """Metadata for cross attention, whose keys are encoder tokens.

    ``slot_mapping`` of the metadata covers the encoder tokens of new requests, so
    ``do_kv_cache_update`` gets exactly their keys, in the order of the requests. Its length varies,
    so no graph can hold it.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: ClassVar[bool] = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """As the base class, over ``encoder_seq_lens`` and not causal.

        Raises
        ------
        ValueError
            The step has no ``encoder_seq_lens``, or no host copy of a length.
        """
        common = common_attn_metadata
        if common.encoder_seq_lens is None:
            raise ValueError("encoder_seq_lens is None; cross attention attends to encoder tokens")
        lengths = common.on_host("encoder_seq_lens")
        step = replace(
            common,
            causal=False,
            seq_lens=common.encoder_seq_lens,
            seq_lens_cpu=lengths,
            max_seq_len=int(lengths.max(initial=0)),
            slot_mapping=encoder_slot_mapping(common, self.kv_cache_spec.block_size),
        )
        return super().build(common_prefix_len, step, fast_build)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Refused: see the class."""
        raise NotImplementedError(
            "cross attention cannot be captured: its number of slots varies; run the step eagerly "
            "or capture it piecewise"
        )

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: Any, slot_mapping: Any
    ) -> FlashAttentionMetadata:
        """Refused: slots are made from the table, so build anew."""
        raise NotImplementedError(
            "cross attention makes its slots from the block table; call build for each group"
        )
