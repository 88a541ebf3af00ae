"""The tokens of one step, on the host and in the arrays that the model reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash.backend import CommonAttentionMetadata

__all__ = ["Batch", "BatchBuffers"]

Array = Any  # of NumPy or CuPy


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step, request after request, and where their keys lie.

    Attributes
    ----------
    tokens, positions : array [T], int64
    logit_rows : array [n], int64
        The tokens whose successor is wanted.
    common : CommonAttentionMetadata
    """

    tokens: Array
    positions: Array
    logit_rows: Array
    common: CommonAttentionMetadata

    @property
    def decodes(self) -> bool:
        """Every request computes one token, and wants the next."""
        return self.common.max_query_len == 1 and len(self.logit_rows) == self.common.num_reqs

    @classmethod
    def empty(cls, max_blocks: int) -> Batch:
        """A decode batch of no requests, to be padded."""
        none, starts = np.zeros(0, np.int64), np.zeros(1, np.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=np.zeros(0, np.int32),
            num_reqs=0,
            num_actual_tokens=0,
            max_query_len=1,
            max_seq_len=0,
            block_table_tensor=np.zeros((0, max_blocks), np.int32),
            slot_mapping=none,
        )
        return cls(none, none, none, common)

    def padded(self, size: int, max_seq_len: int) -> Batch:
        """A decode batch of NumPy arrays with requests of no tokens up to ``size``.

        Parameters
        ----------
        size : int
        max_seq_len : int
            The bound that a captured step was planned for.
        """
        common, more = self.common, size - self.common.num_reqs
        lengths = np.pad(common.seq_lens, (0, more))
        starts = np.pad(common.query_start_loc, (0, more), "edge")
        return Batch(
            tokens=np.pad(self.tokens, (0, more)),
            positions=np.pad(self.positions, (0, more)),
            logit_rows=np.pad(self.logit_rows, (0, more)),
            common=replace(
                common,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                seq_lens_cpu=lengths,
                num_reqs=size,
                num_actual_tokens=size,
                max_seq_len=max_seq_len,
                block_table_tensor=np.pad(common.block_table_tensor, ((0, more), (0, 0))),
                slot_mapping=np.pad(common.slot_mapping, (0, more), constant_values=-1),
            ),
        )


class BatchBuffers:
    """Arrays of fixed address, large enough for any step, that batches are copied into.

    The forward pass reads nothing else of a step, so a CUDA graph of it can be replayed after the
    next batch has been copied in.
    """

    def __init__(self, xp: Any, max_tokens: int, max_requests: int, max_blocks: int) -> None:
        self._arrays = {
            "tokens": xp.zeros(max_tokens, np.int64),
            "positions": xp.zeros(max_tokens, np.int64),
            "logit_rows": xp.zeros(max_requests, np.int64),
            "slot_mapping": xp.zeros(max_tokens, np.int64),
            "query_start_loc": xp.zeros(max_requests + 1, np.int32),
            "seq_lens": xp.zeros(max_requests, np.int32),
            "block_table_tensor": xp.zeros((max_requests, max_blocks), np.int32),
        }

    def load(self, batch: Batch) -> Batch:
        """Copy a batch of NumPy arrays in; the same batch over the buffers."""
        common = batch.common
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        return Batch(
            self._copy("tokens", batch.tokens),
            self._copy("positions", batch.positions),
            self._copy("logit_rows", batch.logit_rows),
            replace(common, **{name: self._copy(name, getattr(common, name)) for name in names}),
        )

    def _copy(self, name: str, values: np.ndarray) -> Array:
        view = self._arrays[name][: len(values)]
        if isinstance(view, np.ndarray):
            view[...] = values
        elif view.size:
            view.set(np.ascontiguousarray(values, view.dtype))
        return view
