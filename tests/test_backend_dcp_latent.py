"""Context parallelism through the backend of latent attention: each rank holds a share of rows."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from batches import starts

from cupyflash.backend import (
    AttentionSelectorConfig,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.backends import MLABackend, MLAImpl, MLAMetadataBuilder, get_attn_backend
from cupyflash.distributed import RankLostError, Sharding
from cupyflash.distributed.local import run_processes, run_threads
from cupyflash.testing import POISON_INDEX, assert_within, attention_oracle

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, LATENT, NOPE, ROPE, DIM_V, BLOCK = 4, 64, 32, 16, 24, 16
SCALE = (NOPE + ROPE) ** -0.5
STEPS = {
    "decode": ((1, 50), (1, 7), (1, 33)),
    "one token of context": ((1, 1), (2, 0)),
    "drafts and prompts": ((3, 40), (1, 0), (9, 25), (0, 8)),
    "new prompts": ((5, 0), (20, 0)),
}
GRAPHS = {"full_cuda_graphs": True, "max_cudagraph_capture_size": 64}


def rows_of(lengths, dtype):
    """The cache row [latent, rope] of every token, the same on all ranks."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((q + c, LATENT + ROPE)).astype(dtype) for q, c in lengths]


def heads_of(rank, lengths, dtype):
    """A rank's up-projection and its queries."""
    rng = np.random.default_rng(1 + rank)
    weight = rng.standard_normal((LATENT, HEADS * (NOPE + DIM_V))) * LATENT**-0.5
    query = rng.standard_normal((sum(q for q, _ in lengths), HEADS, NOPE + ROPE))
    return weight.astype(dtype), query.astype(dtype)


def layer_of(weight):
    return MLAImpl(
        HEADS, LATENT + ROPE, SCALE, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=DIM_V, kv_b_proj=weight,
    )  # fmt: skip


def builder_of(layer, group, dtype, every, **options):
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    limits = BackendConfig(
        max_num_seqs=8, layers={"a": layer}, dcp_world_size=size, dcp_rank=rank, dcp_group=group,
        cp_kv_cache_interleave_size=every, **options,
    )  # fmt: skip
    return MLAMetadataBuilder(KVCacheSpec(BLOCK, 1, LATENT + ROPE, dtype.name), ["a"], limits)


def engine_step(group, lengths, dtype, every=1, options=None, padding=2):
    """What an engine does on one rank: stores contexts and new tokens of its own, and attends."""
    dtype = np.dtype(dtype)
    weight, query = heads_of(group.rank, lengths, dtype)
    layer, rows = layer_of(weight), rows_of(lengths, dtype)
    builder = builder_of(layer, group, dtype, every, **(options or {}))
    sharding = Sharding(group.size, every, BLOCK)
    columns = [-(-sharding.max_local_length(q + c) // BLOCK) for q, c in lengths]
    table = np.full((len(lengths), max(columns) + 1), POISON_INDEX, np.int32)
    order = iter(np.random.default_rng(2).permutation(sum(columns) + 2).tolist())
    for row, count in zip(table, columns, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    cache = np.full((sum(columns) + 2, BLOCK, LATENT + ROPE), np.nan, dtype)
    request = np.repeat(np.arange(len(lengths)), [q + c for q, c in lengths])
    position = np.concatenate([np.arange(q + c) for q, c in lengths])
    slots, flat = sharding.slot_mapping(group.rank, table, request, position), np.concatenate(rows)
    new = np.concatenate([np.arange(q + c) >= c for q, c in lengths])
    layer.do_kv_cache_update(
        None, flat[~new, :LATENT], flat[~new, None, LATENT:], cache, slots[~new]
    )
    lens = np.array([q + c for q, c in lengths], np.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts([q for q, _ in lengths]), seq_lens=lens, num_reqs=len(lengths),
        num_actual_tokens=len(query), max_query_len=max(q for q, _ in lengths),
        max_seq_len=int(lens.max()), block_table_tensor=table, slot_mapping=slots[new],
    )  # fmt: skip
    step = builder.build(0, common)
    key, value = flat[new, :LATENT], flat[new, None, LATENT:]
    layer.do_kv_cache_update(None, key, value, cache, step.slot_mapping)
    out = np.full((len(query) + padding, HEADS * DIM_V), np.nan, dtype)
    padded = np.concatenate([query, np.full((padding, *query.shape[1:]), np.nan, dtype)])
    layer.forward(None, padded, key, value, cache, step, out)
    assert np.isnan(out[len(query) :].astype(np.float32)).all()
    return out[: len(query)].reshape(-1, HEADS, DIM_V)


def right_of(rank, lengths, dtype):
    """Expanded in float64, request by request."""
    weight, query = heads_of(rank, lengths, dtype)
    weight = weight.astype(np.float64).reshape(LATENT, HEADS, -1)
    first, outs = starts([q for q, _ in lengths]), []
    for i, rows in enumerate(rows_of(lengths, dtype)):
        both = np.einsum("tl,lhd->thd", rows[:, :LATENT].astype(np.float64), weight)
        rope = rows[:, None, LATENT:].astype(np.float64)
        keys = np.concatenate(
            [both[..., :NOPE], np.broadcast_to(rope, (len(rows), HEADS, ROPE))], -1
        )
        own = query[first[i] : first[i + 1]]
        outs.append(
            attention_oracle(own, keys, both[..., NOPE:], softmax_scale=SCALE, causal=True)[0]
        )
    return np.concatenate(outs)


def check(lengths, dtype, results):
    for rank, found in enumerate(results):
        right = right_of(rank, lengths, dtype)
        if dtype == np.float32:
            np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-4)
        else:
            baseline = run_threads(engine_step, 1, lengths, dtype)[0]
            error = np.abs(baseline.astype(np.float64) - right_of(0, lengths, dtype)).max()
            assert_within(found, right, right + error)


@pytest.mark.parametrize("options", [{}, {"dcp_combine": "ag_rs"}, GRAPHS], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", STEPS)
def test_ranks_have_the_answer_of_one(name, size, options):
    found = run_threads(engine_step, size, STEPS[name], np.float32, 2, options)
    check(STEPS[name], np.float32, found)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=["fp16", "bf16"])
def test_16_bits(dtype):
    for lengths in STEPS.values():
        check(lengths, dtype, run_threads(engine_step, 3, lengths, dtype))


def test_ranks_as_processes():
    lengths = STEPS["drafts and prompts"]
    check(lengths, np.float32, run_processes(engine_step, 2, lengths, np.float32, timeout=60.0))


def emulated_step(group, lengths, dtype):
    from emulator import emulated

    with emulated("sm_90"):
        return engine_step(group, lengths, dtype)


def test_ranks_over_the_real_kernels():
    lengths = ((1, 40), (2, 9))
    results = run_processes(emulated_step, 2, lengths, np.float16, timeout=120.0)
    check(lengths, np.dtype(np.float16), results)


def another_batch(group, lengths):
    changed = ((2, 50), *lengths[1:]) if group.rank else lengths
    return engine_step(group, changed, np.float32)


def test_a_rank_with_another_step_fails_on_every_rank():
    with pytest.raises(RankLostError, match="2 of 2 ranks failed") as caught:
        run_threads(another_batch, 2, STEPS["decode"], timeout=20.0)
    assert "the step of rank" in str(caught.value)


def test_without_a_communicator_nothing_is_written():
    lengths = STEPS["decode"]
    weight, query = heads_of(0, lengths, np.float32)
    layer, common = layer_of(weight), None
    builder = builder_of(layer, None, np.dtype(np.float32), 1)
    builder = MLAMetadataBuilder(
        builder.kv_cache_spec, ["a"], replace(builder.config, dcp_world_size=2)
    )
    lens = np.array([q + c for q, c in lengths], np.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts([q for q, _ in lengths]), seq_lens=lens, num_reqs=len(lengths),
        num_actual_tokens=len(query), max_query_len=1, max_seq_len=int(lens.max()),
        block_table_tensor=np.zeros((3, 4), np.int32), slot_mapping=np.zeros(3, np.int64),
    )  # fmt: skip
    out = np.full((len(query), HEADS * DIM_V), np.nan, np.float32)
    cache = np.zeros((1, BLOCK, LATENT + ROPE), np.float32)
    new = np.zeros((len(query), LATENT), np.float32), np.zeros((len(query), ROPE), np.float32)
    with pytest.raises(ValueError, match="without a dcp_group"):
        layer.forward(None, query, *new, cache, builder.build(0, common), out)
    assert np.isnan(out).all()
    with pytest.raises(ValueError, match="interleave_size=3 must divide"):
        MLAMetadataBuilder(
            builder.kv_cache_spec, ["a"], replace(builder.config, cp_kv_cache_interleave_size=3)
        )


def test_the_backend_is_chosen_for_ranks():
    asked = AttentionSelectorConfig(head_size=576, dtype="bfloat16", use_mla=True, use_dcp=True)
    assert get_attn_backend(asked, (9, 0)) is MLABackend
