"""Context parallelism through builder and layer: engines that each hold a share of the cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from batches import starts
from hypothesis import given
from hypothesis import strategies as st
from ranks import LITERAL, SCALE, Case, Step

from cupyflash.backend import (
    AttentionSelectorConfig,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.backends import (
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
    unsupported_reasons,
)
from cupyflash.distributed import RankLostError
from cupyflash.distributed.local import run_threads
from cupyflash.testing import DTYPES

GRAPHS = {"full_cuda_graphs": True, "max_cudagraph_capture_size": 64}


def make_layer(case, sinks=None, **options):
    heads = case.num_kv_heads * case.group_size
    return FlashAttentionImpl(
        heads, case.head_dim, SCALE, case.num_kv_heads, kv_cache_dtype=case.kv_cache_dtype,
        logits_soft_cap=case.softcap, sinks=sinks, **options,
    )  # fmt: skip


def make_builder(case, layers, group=None, size=1, rank=0, **config):
    limits = BackendConfig(
        max_num_seqs=len(case.lengths), layers=layers, dcp_world_size=size, dcp_rank=rank,
        cp_kv_cache_interleave_size=case.interleave, dcp_group=group, dcp_combine=case.combine,
        **config,
    )  # fmt: skip
    spec = KVCacheSpec(
        case.block_size, case.num_kv_heads, case.head_dim, case.dtype, case.kv_cache_dtype
    )
    return FlashAttentionMetadataBuilder(spec, list(layers), limits)


def make_common(case, step, slots):
    seq_lens = np.array([q + n for q, n in case.lengths], np.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts(step.q_lens),
        seq_lens=seq_lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(step.q_lens) + case.padding,
        max_query_len=max(step.q_lens),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=step.table,
        slot_mapping=slots,
        causal=case.causal,
    )


def engine_step(group, case, config, lse=False):
    """What an engine does on one rank: slots of its own tokens, metadata, write, attend."""
    step, sharding = Step(case, group.size), case.sharding(group.size)
    q, sinks = step.own(group.rank)
    layer = make_layer(case, sinks)
    builder = make_builder(case, {"a": layer}, group, group.size, group.rank, **config)
    request = np.repeat(np.arange(len(step.q_lens)), step.q_lens)
    position = np.concatenate([n + np.arange(q) for q, n in case.lengths])
    slots = sharding.slot_mapping(group.rank, step.table, request, position)
    slots = np.pad(slots, (0, case.padding), constant_values=-1)
    metadata = builder.build(0, make_common(case, step, slots))
    scales = SimpleNamespace(
        _q_scale=1.0, _k_scale=float(step.scales[0]), _v_scale=float(step.scales[1])
    )
    key, value, caches = step.new(step.keys), step.new(step.values), step.caches(group.rank)
    layer.do_kv_cache_update(scales, key, value, caches, metadata.slot_mapping)
    layer.need_to_return_lse_for_decode = lse
    out = np.full((len(q), q.shape[1], case.head_dim), np.nan, DTYPES[case.dtype])
    found = layer.forward(scales, q, key, value, caches, metadata, out)
    return (out, found[1]) if lse else (out, None)


@pytest.mark.parametrize("config", [{}, GRAPHS, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_engines_on_ranks_have_the_answer_of_one(size, config):
    for case in (
        Case(sink=True, padding=2),
        Case(dtype="bf16", kv_cache_dtype="fp8", num_kv_heads=2, interleave=4, combine="ag_rs"),
        Case(((3, 0), (2, 0)), sink=True),
    ):
        if size == 1 and case.kv_cache_dtype != "auto":
            continue  # one rank reads its new tokens from the cache, as it stores them
        found = run_threads(engine_step, size, case, config)
        for rank, (out, _) in enumerate(found):
            rows = sum(q for q, _ in case.lengths)
            step = Step(case, size)
            step.expected(rank).check(out[:rows])
            assert np.isnan(out[rows:].astype(np.float32)).all()


def test_the_lse_is_that_of_all_keys():
    case = Case(sink=True)
    for rank, (out, lse) in enumerate(run_threads(engine_step, 3, case, {}, True)):
        Step(case, 3).expected(rank).check(out, lse)


def another_batch(group, case):
    lengths = ((2, 40), *LITERAL[1:]) if group.rank == 2 else LITERAL
    return engine_step(group, replace(case, lengths=lengths), {})


def another_type(group, case):
    dtype = "bf16" if group.rank == 2 else "fp16"
    return engine_step(group, replace(case, dtype=dtype), {})


@pytest.mark.parametrize("function", [another_batch, another_type])
def test_a_rank_with_another_step_fails_on_every_rank(function):
    with pytest.raises(RankLostError, match="3 of 3 ranks failed") as caught:
        run_threads(function, 3, Case(), timeout=20.0)
    errors = {outcome.error for outcome in caught.value.outcomes}
    assert "DisagreementError" in errors <= {"DisagreementError", "RankLostError"}
    assert "the step of rank" in str(caught.value)


# What counts positions is whole on every rank


@pytest.mark.parametrize("options", [{"sliding_window": 9}, {"alibi_slopes": [0.1, 0.2]}])
def test_layers_that_count_positions_keep_their_whole_cache(options):
    case = Case()
    layers = {"a": make_layer(case, **options)}
    builder = make_builder(case, layers, size=2, rank=1)
    step = Step(case, 1)
    metadata = builder.build(0, make_common(case, step, np.zeros(sum(step.q_lens), np.int64)))
    assert metadata.dcp_context_kv_lens is None
    with pytest.raises(ValueError, match="a group of their own"):
        make_builder(case, {**layers, "b": make_layer(case)}, size=2)


def test_settings_of_a_group():
    class Group:
        rank, size = 1, 3

    for config in ({"dcp_world_size": 2, "dcp_rank": 1}, {"dcp_world_size": 3, "dcp_rank": 0}):
        with pytest.raises(ValueError, match="dcp_group has rank 1 of 3"):
            BackendConfig(max_num_seqs=1, dcp_group=Group(), **config)
    with pytest.raises(ValueError, match="use 'auto', 'a2a', 'ag' or 'ag_rs'"):
        BackendConfig(max_num_seqs=1, dcp_combine="ring")
    with pytest.raises(ValueError, match="interleave_size=3 must divide"):
        make_builder(Case(interleave=3), {"a": make_layer(Case())}, size=2)
    asked = AttentionSelectorConfig(head_size=64, dtype="float32", use_dcp=True)
    assert unsupported_reasons(asked, None)["REFERENCE"] == []


@given(st.integers(0, 3), st.sampled_from([1, 2]))
def test_a_captured_step_reads_contexts_that_are_not_there_yet(rank, interleave):
    case = Case(((1, 0), (1, 0)), interleave=interleave)
    step = Step(case, 4)
    slots = np.zeros(2, np.int64)
    for config, bound in ((GRAPHS, interleave), ({}, 0)):
        builder = make_builder(case, {"a": make_layer(case)}, None, 4, rank, **config)
        metadata = builder.build(0, make_common(case, step, slots))
        assert metadata.max_dcp_context_kv_len == bound
        assert (metadata.scheduler_metadata is not None) == bool(bound)
