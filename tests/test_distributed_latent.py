"""Multi-head latent attention over a context on many ranks."""

from __future__ import annotations

import numpy as np
import pytest
from batches import starts

from cupyflash.distributed import Sharding, context_parallel_attention
from cupyflash.distributed.local import run_threads
from cupyflash.testing import expect_attention

LENGTHS, HEADS, LATENT, ROPE, BLOCK, SCALE = ((1, 50), (2, 7), (1, 0)), 4, 128, 64, 16, 0.1


def operands(rank):
    """Rows [latent, rope] of all tokens of each request, and a rank's queries over both parts."""
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((q + n, 1, LATENT + ROPE)).astype(np.float32) for q, n in LENGTHS]
    tokens = sum(q for q, _ in LENGTHS)
    shape = (tokens, HEADS, LATENT + ROPE)
    return rows, np.random.default_rng(1 + rank).standard_normal(shape).astype(np.float32)


def latent_step(group):
    rows, queries = operands(group.rank)
    sharding, context = Sharding(group.size, 1, BLOCK), [n for _, n in LENGTHS]
    columns = -(-sharding.max_local_length(max(context)) // BLOCK)
    table = np.arange(len(rows) * columns, dtype=np.int32).reshape(-1, columns)
    cache = np.full((table.size, BLOCK, 1, LATENT + ROPE), np.nan, np.float32)
    for request, (own, n) in enumerate(zip(rows, context, strict=True)):
        slots = sharding.slot_mapping(group.rank, table, np.full(n, request), np.arange(n))
        mine = slots >= 0
        cache.reshape(-1, 1, LATENT + ROPE)[slots[mine]] = own[:n][mine]
    new = np.concatenate([own[n:] for own, n in zip(rows, context, strict=True)])
    q_lens = [q for q, _ in LENGTHS]
    return context_parallel_attention(
        group, queries[..., LATENT:], new[..., LATENT:], new[..., :LATENT], cache[..., LATENT:],
        cache[..., :LATENT], cu_seqlens_q=starts(q_lens), max_seqlen_q=max(q_lens),
        context_lens=sharding.local_lengths(np.array(context, np.int32), group.rank),
        max_context_len=sharding.max_local_length(max(context)), block_table=table,
        q_v=queries[..., :LATENT], softmax_scale=SCALE,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_latent_attention_on_ranks_is_one_pass(size):
    for rank, (out, lse) in enumerate(run_threads(latent_step, size)):
        rows, queries = operands(rank)
        whole = np.concatenate(rows)
        right = expect_attention(
            queries, whole, whole[..., :LATENT], causal=True, softmax_scale=SCALE,
            cu_seqlens_q=starts([q for q, _ in LENGTHS]),
            cu_seqlens_k=starts([len(own) for own in rows]),
        )  # fmt: skip
        right.check(out, lse)
