"""Decode over a paged KV cache, on NumPy arrays; with CuPy arrays the same calls run kernels.

Three requests of different lengths share one pool of blocks. Each step writes the new tokens to
their slots and attends to everything that a request has so far.
"""

from __future__ import annotations

import numpy as np

from cupyflash import flash_attn_varlen_func, reshape_and_cache_flash

BLOCK, HEADS, KV_HEADS, DIM = 16, 8, 2, 64
rng = np.random.default_rng(0)

key_cache = np.zeros((32, BLOCK, KV_HEADS, DIM), np.float16)
value_cache = np.zeros_like(key_cache)
free = list(rng.permutation(32))  # blocks may come in any order
lengths = np.array([5, 40, 17], np.int32)
block_table = np.zeros((3, 8), np.int32)
for request, length in enumerate(lengths):
    for column in range(-(-int(length + 4) // BLOCK)):  # room for the prompt and four more
        block_table[request, column] = free.pop()


def random(tokens: int, heads: int) -> np.ndarray:
    return rng.standard_normal((tokens, heads, DIM)).astype(np.float16)


def write(positions: np.ndarray, requests: np.ndarray) -> None:
    """Keys and values of new tokens, at the slots that the block table gives them."""
    blocks = block_table[requests, positions // BLOCK].astype(np.int64)
    slots = blocks * BLOCK + positions % BLOCK
    key, value = random(len(slots), KV_HEADS), random(len(slots), KV_HEADS)
    reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", 1.0, 1.0)


def attend(query_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return flash_attn_varlen_func(
        random(int(starts[-1]), HEADS),
        key_cache,
        value_cache,
        max_seqlen_q=int(query_lens.max()),
        cu_seqlens_q=starts,
        max_seqlen_k=int(lengths.max()),
        seqused_k=lengths,
        block_table=block_table,
        causal=True,
        return_softmax_lse=True,
    )


requests = np.repeat(np.arange(3), lengths)
write(np.concatenate([np.arange(n) for n in lengths]), requests)
out, lse = attend(lengths)
print(f"prompts of {lengths.tolist()} tokens: out {out.shape}, lse {lse.shape}")

for step in range(4):
    write(lengths.copy(), np.arange(3))
    lengths += 1
    out, lse = attend(np.ones(3, np.int32))
    sums = ", ".join(f"{value:.3f}" for value in lse[0])
    print(f"step {step}: {lengths.tolist()} keys, log-sum-exp of head 0: {sums}")
