"""An engine that replays its decode steps as CUDA graphs, for batches of 1 to 256 requests.

A graph is captured for some sizes; a batch in between is padded with requests of no tokens. What a
step changes (lengths, blocks, slots, inputs) is copied to where the graph reads it, and the builder
refreshes the metadata at its fixed address. Each replay is held against the same step run eagerly,
bit by bit. On NumPy arrays there is nothing to capture: padded steps are held against plain ones.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyflash.backend import (
    AttentionSelectorConfig,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.backends import get_attn_backend

BLOCK, HEADS, KV_HEADS, DIM, LAYERS = 16, 8, 2, 64, 2
SIZES = (1, 2, 4, *range(8, 257, 8))  # what is captured
SCALES = SimpleNamespace(_q_scale=1.0, _k_scale=1.0, _v_scale=1.0)


class GraphEngine:
    """Decode steps over layers of attention alone; each layer asks with the last one's answer.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    max_reqs : int
    max_len : int
        Most keys of a request: graphs are planned for this bound, whatever the lengths are.
    """

    def __init__(self, xp: Any, max_reqs: int = 256, max_len: int = 1024) -> None:
        self.xp, self.max_reqs, self.max_len = xp, max_reqs, max_len
        self.max_blocks = -(-max_len // BLOCK)
        self.rng = np.random.default_rng(0)
        self._make_layers()
        self._make_inputs()
        self.graphs: dict[int, tuple[Any, Any]] = {}
        if xp is not np:
            self.stream = xp.cuda.Stream(non_blocking=True)
            self.pool = xp.cuda.MemoryPool()  # of the graphs alone
            xp.cuda.Device().synchronize()

    def _make_layers(self) -> None:
        xp, on_cpu = self.xp, self.xp is np
        asked = AttentionSelectorConfig(head_size=DIM, dtype="float16", block_size=BLOCK)
        digits = "" if on_cpu else xp.cuda.Device().compute_capability
        capability = None if on_cpu else (int(digits[:-1]), int(digits[-1]))
        backend = get_attn_backend(asked, capability, "FLASH_ATTN")
        make = backend.get_impl_cls()
        self.layers = {f"layers.{i}": make(HEADS, DIM, DIM**-0.5, KV_HEADS) for i in range(LAYERS)}
        blocks = 1 + self.max_reqs * self.max_blocks  # block 0 is nobody's
        shape = backend.get_kv_cache_shape(blocks, BLOCK, KV_HEADS, DIM)
        self.caches = [xp.asarray(self._normal(shape)) for _ in self.layers]
        limits = BackendConfig(
            max_num_seqs=self.max_reqs,
            layers=self.layers,
            full_cuda_graphs=True,
            max_cudagraph_capture_size=self.max_reqs,
        )
        spec = KVCacheSpec(BLOCK, KV_HEADS, DIM, "float16")
        self.builder = backend.get_builder_cls()(spec, list(self.layers), limits)

    def _make_inputs(self) -> None:
        """What a graph reads, at fixed addresses."""
        xp, n = self.xp, self.max_reqs
        self.inputs = {
            "query": xp.zeros((n, HEADS, DIM), np.float16),
            "key": xp.zeros((n, KV_HEADS, DIM), np.float16),
            "value": xp.zeros((n, KV_HEADS, DIM), np.float16),
            "query_start_loc": xp.zeros(n + 1, np.int32),
            "seq_lens": xp.zeros(n, np.int32),
            "block_table_tensor": xp.zeros((n, self.max_blocks), np.int32),
            "slot_mapping": xp.zeros(n, np.int64),
        }

    def _normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32).astype(np.float16)

    def random_step(self, requests: int) -> dict[str, np.ndarray]:
        """Some requests' next token: any lengths, any blocks."""
        lengths = self.rng.integers(1, self.max_len + 1, requests).astype(np.int32)
        blocks = 1 + self.rng.permutation(self.max_reqs * self.max_blocks).astype(np.int32)
        table = blocks[: requests * self.max_blocks].reshape(requests, self.max_blocks)
        last = lengths.astype(np.int64) - 1
        slots = table[np.arange(requests), last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK
        return {
            "query": self._normal((requests, HEADS, DIM)),
            "key": self._normal((requests, KV_HEADS, DIM)),
            "value": self._normal((requests, KV_HEADS, DIM)),
            "query_start_loc": np.arange(requests + 1, dtype=np.int32),
            "seq_lens": lengths,
            "block_table_tensor": table,
            "slot_mapping": slots,
        }

    def load(self, step: dict[str, np.ndarray], size: int) -> CommonAttentionMetadata:
        """Copy a step in, with requests of no tokens behind it up to ``size``."""
        requests = len(step["seq_lens"])
        for name, values in step.items():
            rows = size + 1 if name == "query_start_loc" else size
            padding = {"query_start_loc": requests, "slot_mapping": -1}.get(name, 0)
            padded = np.full((rows, *values.shape[1:]), padding, values.dtype)
            padded[: len(values)] = values
            self.inputs[name][:rows] = self.xp.asarray(padded)
        names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        fields = {n: self.inputs[n][: size + (n == "query_start_loc")] for n in names}
        return CommonAttentionMetadata(
            **fields,
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            max_seq_len=self.max_len,
        )

    def forward(self, metadata: Any) -> Any:
        """Every layer of a step; the last one's output [tokens, HEADS, DIM]."""
        tokens = slice(0, metadata.num_actual_tokens)
        x, key, value = (self.inputs[name][tokens] for name in ("query", "key", "value"))
        for layer, cache in zip(self.layers.values(), self.caches, strict=True):
            layer.do_kv_cache_update(SCALES, key, value, cache, metadata.slot_mapping)
            out = self.xp.zeros_like(x)  # rows of padding are left as they are
            layer.forward(SCALES, x, key, value, cache, metadata, out)
            x = x + out
        return x

    def capture(self, sizes: tuple[int, ...]) -> None:
        """A graph of each size, the largest first: its buffers fit the others."""
        nothing = {name: values[:0] for name, values in self.random_step(1).items()}
        nothing["query_start_loc"] = np.zeros(1, np.int32)
        for size in sorted(sizes, reverse=True):
            with self.stream, self.xp.cuda.using_allocator(self.pool.malloc):
                metadata = self.builder.build_for_cudagraph_capture(self.load(nothing, size))
                self.forward(metadata)  # compiles, and takes the memory
                self.stream.synchronize()
                self.stream.begin_capture()
                try:
                    out = self.forward(metadata)
                finally:
                    graph = self.stream.end_capture()
            self.graphs[size] = (graph, out)

    def eager(self, step: dict[str, np.ndarray], size: int) -> np.ndarray:
        """A step padded to ``size``, launch by launch."""
        out = self.forward(self.builder.build(0, self.load(step, size)))
        requests = len(step["seq_lens"])
        return out[:requests] if self.xp is np else out[:requests].get()

    def replay(self, step: dict[str, np.ndarray]) -> np.ndarray:
        """A step as the smallest graph that holds it."""
        size = min(n for n in self.graphs if n >= len(step["seq_lens"]))
        self.builder.build(0, self.load(step, size))  # refreshes what the graph reads
        graph, out = self.graphs[size]
        graph.launch(self.stream)
        return out[: len(step["seq_lens"])].get()


def compare(engine: GraphEngine, requests: int, sizes: tuple[int, ...]) -> bool:
    """Whether a step has the same bits padded or replayed as it has without."""
    step, size = engine.random_step(requests), min(n for n in sizes if n >= requests)
    if engine.xp is np:
        return bool((engine.eager(step, size) == engine.eager(step, requests)).all())
    with engine.stream:
        right = engine.eager(step, size)
        return engine.replay(step).tobytes() == right.tobytes()


def microseconds(engine: GraphEngine, size: int, replayed: bool) -> float:
    """Of one step, its copies and metadata left out; the best of some."""
    with engine.stream:
        step = engine.load(engine.random_step(size), size)
        metadata, best = engine.builder.build(0, step), float("inf")
        for _ in range(20):
            engine.stream.synchronize()
            start = time.perf_counter()
            if replayed:
                engine.graphs[size][0].launch(engine.stream)
            else:
                engine.forward(metadata)
            engine.stream.synchronize()
            best = min(best, time.perf_counter() - start)
    return best * 1e6


def array_module() -> Any:
    """CuPy where it has a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def main() -> None:
    xp = array_module()
    if xp is np:
        engine = GraphEngine(np, max_reqs=16, max_len=64)
        same = [compare(engine, n, (1, 2, 4, 8, 16)) for n in range(1, 17)]
        print(f"no GPU: {sum(same)} of {len(same)} padded steps equal the plain ones")
        return
    engine = GraphEngine(xp)
    engine.capture(SIZES)
    same = [compare(engine, n, SIZES) for n in range(1, 257)]
    print(f"{len(SIZES)} graphs: {sum(same)} of {len(same)} replays equal the eager steps")
    for size in (1, 8, 64, 256):
        eager, replay = (microseconds(engine, size, replayed) for replayed in (False, True))
        print(f"{size:4} requests: eager {eager:6.0f} us, replayed {replay:6.0f} us")


if __name__ == "__main__":
    main()
