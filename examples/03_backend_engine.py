"""The smallest engine over the backend layer: paged requests that share a system prompt.

What an engine does in each step: give blocks and slots, look for a shared prefix, let the builder
make the metadata once, and run every layer on it. Here 40 requests share 256 tokens and decode; the
shared blocks are then read once for all of them. Every step is checked against plain attention.

NumPy arrays; with CuPy arrays, and host copies of the lengths, the same calls run kernels.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from cupyflash.backend import (
    AttentionSelectorConfig,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.backends import get_attn_backend
from cupyflash.backends.common_prefix import common_prefix_len

BLOCK, BLOCKS, LAYERS = 16, 128, 2
HEADS, KV_HEADS, DIM = 16, 4, 64
SHARED, REQUESTS, STEPS = 256, 40, 2
NUM_SMS = 132  # of the GPU; the rule for shared prefixes weighs waves of tiles

rng = np.random.default_rng(0)


class Engine:
    """Requests, their blocks, and the layers of a model whose weights are dice."""

    def __init__(self) -> None:
        config = AttentionSelectorConfig(head_size=DIM, dtype="float16", block_size=BLOCK)
        self.backend = get_attn_backend(config, device_capability=None)
        make_layer = self.backend.get_impl_cls()
        self.layers = {
            f"layers.{i}": make_layer(HEADS, DIM, DIM**-0.5, KV_HEADS) for i in range(LAYERS)
        }
        shape = self.backend.get_kv_cache_shape(BLOCKS, BLOCK, KV_HEADS, DIM)
        self.caches = {name: np.zeros(shape, np.float16) for name in self.layers}
        limits = BackendConfig(max_num_seqs=REQUESTS, layers=self.layers)
        spec = KVCacheSpec(BLOCK, KV_HEADS, DIM, "float16")
        self.builder = self.backend.get_builder_cls()(spec, list(self.layers), limits)
        self.free = list(range(BLOCKS - 1, 0, -1))  # block 0 is nobody's
        self.table = np.zeros((REQUESTS, 24), np.int32)
        self.lengths = np.zeros(REQUESTS, np.int32)
        self.scales = SimpleNamespace(_q_scale=1.0, _k_scale=1.0, _v_scale=1.0)

    def share(self, source: int, target: int, tokens: int) -> None:
        """Let a request begin with the blocks of another one."""
        self.table[target, : tokens // BLOCK] = self.table[source, : tokens // BLOCK]
        self.lengths[target] = tokens

    def step(self, query_lens: dict[int, int]) -> tuple[int, int, float]:
        """Compute the next tokens of some requests.

        Returns their number, the length of the prefix that was read once, and the largest
        difference to attention without a shared prefix.
        """
        rows = np.array(list(query_lens))
        queries = np.array(list(query_lens.values()), np.int32)
        computed = self.lengths[rows].copy()
        slots = np.concatenate([self._slots(r, n) for r, n in query_lens.items()])
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=self.lengths[rows],
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(queries.max()),
            max_seq_len=int(self.lengths[rows].max()),
            block_table_tensor=self.table[rows],
            slot_mapping=slots,
        )
        prefix = common_prefix_len(self.table[rows], computed, BLOCK, null_block=0)
        wanted = self.builder.use_cascade_attention(
            prefix, queries.tolist(), HEADS, KV_HEADS, False, False, False, NUM_SMS, 1
        )
        prefix = prefix if wanted else 0
        metadata = self.builder.build(prefix, common)
        plain = self.builder.build(0, common, fast_build=True)
        difference = max(
            self._layer(name, int(starts[-1]), metadata, plain) for name in self.layers
        )
        return int(starts[-1]), prefix, difference

    def _slots(self, request: int, count: int) -> np.ndarray:
        """Where the next tokens of a request go; blocks are taken as they are needed."""
        positions = np.arange(self.lengths[request], self.lengths[request] + count)
        for column in range(-(-int(positions[-1] + 1) // BLOCK)):
            if self.table[request, column] == 0:
                self.table[request, column] = self.free.pop()
        self.lengths[request] += count
        blocks = self.table[request, positions // BLOCK].astype(np.int64)
        return blocks * BLOCK + positions % BLOCK

    def _layer(self, name: str, tokens: int, metadata: object, plain: object) -> float:
        layer, cache = self.layers[name], self.caches[name]
        query = rng.standard_normal((tokens, HEADS, DIM)).astype(np.float16)
        key, value = rng.standard_normal((2, tokens, KV_HEADS, DIM)).astype(np.float16)
        layer.do_kv_cache_update(self.scales, key, value, cache, metadata.slot_mapping)
        outputs = []
        for step in (metadata, plain):
            output = np.empty_like(query)
            layer.forward(self.scales, query, key, value, cache, step, output)
            outputs.append(output.astype(np.float32))
        return float(np.abs(outputs[0] - outputs[1]).max())


def report(what: str, tokens: int, prefix: int, difference: float) -> None:
    read = f"{prefix} shared keys read once" if prefix else "no shared prefix"
    print(f"{what}: {tokens} tokens, {read}, off by {difference:.1e}")


def main() -> None:
    engine = Engine()
    print(f"backend {engine.backend.get_name()}")
    report("system prompt", *engine.step({0: SHARED}))
    for request in range(1, REQUESTS):
        engine.share(0, request, SHARED)
    own = rng.integers(1, 9, REQUESTS).tolist()
    report("user prompts", *engine.step(dict(enumerate(own))))
    for count in range(STEPS):
        report(f"decode {count}", *engine.step(dict.fromkeys(range(REQUESTS), 1)))


if __name__ == "__main__":
    main()
