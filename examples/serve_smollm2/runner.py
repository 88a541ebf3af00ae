"""Batches on their way through the model: copied in, computed or replayed, logits back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import Array, Batch, BatchBuffers
from .kv_cache import KVCache

if TYPE_CHECKING:
    from .model import Model

__all__ = ["Runner", "graph_sizes"]


def graph_sizes(max_requests: int) -> list[int]:
    """Sizes of decode batches to capture: powers of two up to 16, then steps of 16."""
    small = [1 << n for n in range(4) if 1 << n < max_requests]
    return [*small, *range(16, max_requests, 16), max_requests]


class Runner:
    """Computes an engine's batches.

    With ``graphs``, decode steps of every size up to ``max_requests`` are captured at the start as
    CUDA graphs; a smaller batch is padded with requests of no tokens. Other steps run as they are.

    Parameters
    ----------
    model : Model
    cache : KVCache
    token_budget, max_requests, max_blocks : int
        Most tokens and requests of a batch, and blocks of a request.
    graphs : bool
        Needs a GPU.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        token_budget: int,
        max_requests: int,
        max_blocks: int,
        graphs: bool = False,
    ) -> None:
        if graphs and model.xp is np:
            raise ValueError("graphs=True needs a GPU; NumPy has nothing to capture")
        self.model, self.cache = model, cache
        self.replays = 0
        self._max_seq_len = max_blocks * cache.block_size
        sizes = [n for n in graph_sizes(max_requests) if n <= token_budget] if graphs else []
        self._buffers = BatchBuffers(model.xp, token_budget, max_requests, max_blocks)
        self._builder = model.make_builder(cache.block_size, max_requests, max(sizes, default=0))
        self._captured: dict[int, tuple[Any, Array]] = {}
        self._stream: Any = None
        if model.xp is not np:
            self._stream = model.xp.cuda.Stream(non_blocking=True)
            model.xp.cuda.Device().synchronize()  # the weights were sent on another stream
            # Temporary arrays of a graph are its own: no other step may get their memory.
            self._pool = model.xp.cuda.MemoryPool()
        empty = Batch.empty(max_blocks)
        for size in reversed(sizes):  # the largest first: its buffers fit the others
            self._capture(size, empty.padded(size, self._max_seq_len))

    def __call__(self, batch: Batch) -> np.ndarray:
        """Logits [len(batch.logit_rows), vocabulary] of a batch of NumPy arrays."""
        size = self._graph_size(batch)
        with self.on_stream():
            if size:
                self._load(batch.padded(size, self._max_seq_len))
                graph, logits = self._captured[size]
                graph.launch(self._stream)
                self.replays += 1
                logits = logits[: len(batch.logit_rows)]
            else:
                logits = self.eager(batch)
            return logits if isinstance(logits, np.ndarray) else logits.get()

    def eager(self, batch: Batch) -> Array:
        """The same without a graph, where the model is."""
        loaded, metadata = self._load(batch)
        return self.model.forward(loaded, metadata, self.cache)

    def _load(self, batch: Batch) -> tuple[Batch, Any]:
        loaded = self._buffers.load(batch)
        return loaded, self._builder.build(0, loaded.common)

    def _graph_size(self, batch: Batch) -> int:
        """The smallest captured batch that holds this one; 0 if none does."""
        fitting = [size for size in self._captured if size >= batch.common.num_reqs]
        return min(fitting, default=0) if batch.decodes else 0

    def on_stream(self) -> AbstractContextManager[Any]:
        """The stream that batches run on; nothing on the CPU."""
        return nullcontext() if self._stream is None else self._stream

    def _capture(self, size: int, batch: Batch) -> None:
        xp, stream = self.model.xp, self._stream
        with stream, xp.cuda.using_allocator(self._pool.malloc):
            loaded = self._buffers.load(batch)
            metadata = self._builder.build_for_cudagraph_capture(loaded.common)
            self.model.forward(loaded, metadata, self.cache)  # compiles, and takes the memory
            stream.synchronize()
            stream.begin_capture()
            try:
                logits = self.model.forward(loaded, metadata, self.cache)
            finally:
                graph = stream.end_capture()
            self._captured[size] = (graph, logits)
