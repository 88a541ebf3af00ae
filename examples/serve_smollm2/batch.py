"""The tokens of one step, on the host and in the arrays that the model reads."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

__all__ = ["Batch", "BatchBuffers"]

Array = Any  # of NumPy or CuPy


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step, request after request, and where their keys lie.

    Attributes
    ----------
    tokens, positions : array [T], int64
    slots : array [T], int64
        Where each token's key and value go in the cache.
    cu_seqlens_q : array [requests + 1], int32
    seqused_k : array [requests], int32
        Keys of each request, the new ones included.
    block_table : array [requests, max_blocks], int32
        -1 behind a request's blocks.
    logit_rows : array [n], int64
        The tokens whose successor is wanted.
    max_seqlen_q, max_seqlen_k : int
    """

    tokens: Array
    positions: Array
    slots: Array
    cu_seqlens_q: Array
    seqused_k: Array
    block_table: Array
    logit_rows: Array
    max_seqlen_q: int
    max_seqlen_k: int


class BatchBuffers:
    """Arrays of fixed address, large enough for any step, that batches are copied into.

    The forward pass reads nothing else of a step, so a CUDA graph of it can be replayed after the
    next batch has been copied in.
    """

    def __init__(self, xp: Any, max_tokens: int, max_requests: int, max_blocks: int) -> None:
        self._arrays = {
            "tokens": xp.zeros(max_tokens, np.int64),
            "positions": xp.zeros(max_tokens, np.int64),
            "slots": xp.zeros(max_tokens, np.int64),
            "cu_seqlens_q": xp.zeros(max_requests + 1, np.int32),
            "seqused_k": xp.zeros(max_requests, np.int32),
            "block_table": xp.zeros((max_requests, max_blocks), np.int32),
            "logit_rows": xp.zeros(max_requests, np.int64),
        }

    def load(self, batch: Batch) -> Batch:
        """Copy a batch of NumPy arrays in; the same batch over the buffers."""
        found = {}
        for name in (f.name for f in fields(Batch) if f.name in self._arrays):
            values = getattr(batch, name)
            view = self._arrays[name][: len(values)]
            if isinstance(view, np.ndarray):
                view[...] = values
            elif view.size:
                view.set(np.ascontiguousarray(values, view.dtype))
            found[name] = view
        return replace(batch, **found)
