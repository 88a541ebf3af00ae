"""What a builder makes of a step: fields, schedules, arrays for graphs."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_cases import Case, cases
from steps import GRAPHS, Made, address

from cupyflash.backend import BackendConfig, KVCacheSpec
from cupyflash.backends import FlashAttentionImpl, FlashAttentionMetadataBuilder
from cupyflash.backends.graph_buffers import GraphBuffers
from cupyflash.scheduler_metadata import SchedulerMetadata

DECODE = Case(((1, 40), (1, 16), (1, 70)), num_kv_heads=2, group_size=2)


def step(step_path, case=DECODE, **config):
    return Made(step_path, case, **config)


def test_a_plain_step_passes_the_engines_arrays_on(step_path):
    made = step(step_path)
    metadata, common = made.builder.build(0, made.common), made.common
    for name, array in (
        ("query_start_loc", common.query_start_loc),
        ("seq_lens", common.seq_lens),
        ("block_table", common.block_table_tensor),
        ("slot_mapping", common.slot_mapping),
    ):
        assert getattr(metadata, name) is array
    for name in ("num_actual_tokens", "max_query_len", "max_seq_len", "causal"):
        assert getattr(metadata, name) == getattr(common, name)
    absent = {
        *("cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens", "prefix_scheduler_metadata"),
        *("max_dcp_context_kv_len", "dcp_context_kv_lens", "dcp_group", "map_block_table"),
    }
    assert {f.name for f in fields(metadata) if getattr(metadata, f.name) is None} == absent
    assert not metadata.use_cascade
    assert metadata.common_prefix_len == metadata.num_cascade_tokens == 0


# Schedules made ahead


def group(step_path, *options, **config):
    layers = {
        f"layer.{i}": FlashAttentionImpl(4, 64, 0.2, 2, **each) for i, each in enumerate(options)
    }
    made = step(step_path)
    config = BackendConfig(max_num_seqs=8, layers=layers, **config)
    spec = KVCacheSpec(16, 2, 64, made.case.dtype)
    return FlashAttentionMetadataBuilder(spec, list(layers), config), made.common


@pytest.mark.parametrize(
    ("options", "config", "made"),
    [
        ([{}, {}], {}, True),
        ([{"sliding_window": 8}] * 2, {}, True),
        ([{"logits_soft_cap": 5.0}, {"logits_soft_cap": 9.0}], {}, True),
        ([{"sliding_window": 8}, {}], {}, False),
        ([{"sliding_window": 8}, {"sliding_window": 9}], {}, False),
        ([{"logits_soft_cap": 5.0}, {}], {}, False),
        ([{}], {"batch_invariant": True}, False),
        ([{"attn_type": "encoder_only"}], {}, False),
    ],
)
def test_a_schedule_is_made_where_all_layers_can_share_it(step_path, options, config, made):
    builder, common = group(step_path, *options, **config)
    assert (builder.build(0, common).scheduler_metadata is not None) == made
    assert builder.build(0, common, fast_build=True).scheduler_metadata is None
    assert builder.build_for_drafting(common, 1).scheduler_metadata is None


@pytest.mark.parametrize(
    ("window", "causal", "sides"),
    [(None, True, (-1, 0)), (8, True, (7, 0)), (8, False, (7, 7)), (None, False, (-1, -1))],
)
def test_a_schedule_is_made_for_the_call(step_path, window, causal, sides):
    case = DECODE.replace(window=window, causal=causal, softcap=3.0, kv_cache_dtype="fp8",
                          dtype="bf16")  # fmt: skip
    made = step(step_path, case)
    bounds = made.builder.build(0, made.common).scheduler_metadata.bounds
    assert (bounds.window_left, bounds.window_right) == sides
    assert (bounds.batch, bounds.max_seqlen_q, bounds.max_seqlen_k) == (3, 1, 76)
    assert (bounds.num_heads_q, bounds.num_heads_kv, bounds.head_dim, bounds.head_dim_v) == (
        *(4, 2, 64, 64),
    )
    assert (bounds.kv_type.name, bounds.page_size, bounds.has_softcap) == ("e4m3", 16, True)


@pytest.mark.parametrize(
    ("config", "fast", "splits"),
    [
        ({}, False, 0),
        (GRAPHS, False, 32),
        ({**GRAPHS, "max_num_splits_for_cuda_graph": 8}, False, 8),
        (GRAPHS, True, 0),  # no schedule to fix
        ({**GRAPHS, "max_cudagraph_capture_size": 3}, False, 32),
        ({**GRAPHS, "max_cudagraph_capture_size": 2}, False, 0),  # never captured
        ({**GRAPHS, "full_cuda_graphs": False}, False, 0),
        ({**GRAPHS, "batch_invariant": True}, False, 1),
    ],
)
def test_splits_are_bounded_where_a_graph_fixes_their_workspace(step_path, config, fast, splits):
    made = step(step_path, **config)
    metadata = made.builder.build(0, made.common, fast_build=fast)
    assert metadata.max_num_splits == splits
    if metadata.scheduler_metadata:
        assert metadata.scheduler_metadata.bounds.num_splits == splits


# B25: builder and call agree on the split bound, whatever the shapes of the last build.
@given(
    case=cases(causal=True, window=None, alibi=False, head_size=32, dtype="fp16",
               kv_cache_dtype="auto", q_fp8=False),
    blocks=st.integers(0, 2),
)  # fmt: skip
def test_schedules_fit_their_calls_from_build_to_build(step_path, case, blocks):
    prefix = blocks * case.block_size
    lengths = tuple((max(q, 1), n + prefix) for q, n in case.lengths)
    config = {**GRAPHS, "max_cudagraph_capture_size": 128}
    made = step(step_path, case.replace(lengths=lengths, prefix=prefix), **config)
    shorter = replace(made.common, max_seq_len=max(made.case.kv_lens))
    for common in (made.common, shorter):
        metadata = made.builder.build(prefix, common)
        made.run(metadata)
    with pytest.raises(ValueError, match="num_splits=32"):
        made.run(replace(metadata, max_num_splits=31))


def test_layers_of_a_group_have_one_number_of_heads(step_path):
    layers = {"a": FlashAttentionImpl(4, 64, 0.2, 2), "b": FlashAttentionImpl(8, 64, 0.2, 2)}
    config, spec = BackendConfig(max_num_seqs=1, layers=layers), KVCacheSpec(16, 2, 64, "fp16")
    with pytest.raises(ValueError, match=r"\[4, 8\] query heads"):
        FlashAttentionMetadataBuilder(spec, ["a", "b"], config)
    with pytest.raises(ValueError, match=r"\['c'\] are not in"):
        FlashAttentionMetadataBuilder(spec, ["a", "c"], config)


# Another group with the same spec


def test_another_groups_metadata_differs_in_blocks_alone(step_path):
    made = step(step_path)
    metadata = made.builder.build(0, made.common)
    table, slots = metadata.block_table + 1, metadata.slot_mapping + 16
    other = made.builder.update_block_table(metadata, table, slots)
    assert other.block_table is table
    assert other.slot_mapping is slots
    changed = {f.name for f in fields(other) if getattr(other, f.name) is not
               getattr(metadata, f.name)}  # fmt: skip
    assert changed == {"block_table", "slot_mapping"}


def test_a_schedule_of_other_layers_is_not_taken_over(step_path):
    plain, common = group(step_path, {})
    metadata = plain.build(0, common)
    for options in ({"sliding_window": 8}, {"logits_soft_cap": 2.0}):
        other, _ = group(step_path, options)
        found = other.update_block_table(metadata, metadata.block_table, metadata.slot_mapping)
        assert found.scheduler_metadata is None
    mixed, _ = group(step_path, {}, {"sliding_window": 8})
    found = mixed.update_block_table(metadata, metadata.block_table, metadata.slot_mapping)
    assert found.scheduler_metadata is None
    same, _ = group(step_path, {})
    found = same.update_block_table(metadata, metadata.block_table, metadata.slot_mapping)
    assert found.scheduler_metadata is metadata.scheduler_metadata


# Arrays for graphs


def test_metadata_of_captured_steps_stays_where_it_is(step_path):
    shared = DECODE.replace(prefix=16, lengths=tuple((q, n + 16) for q, n in DECODE.lengths))
    made = step(step_path, shared, **GRAPHS)
    first = made.builder.build_for_cudagraph_capture(made.common)
    few = made.common.unpadded(2, 2)
    later = made.builder.build(0, few)
    schedules = [m.scheduler_metadata.buffer for m in (first, later)]
    assert address(step_path, schedules[0]) == address(step_path, schedules[1])
    cascades = [made.builder.build(16, common) for common in (made.common, few)]
    for name in ("cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens"):
        one, two = (getattr(metadata, name) for metadata in cascades)
        assert address(step_path, one) == address(step_path, two)
    assert step_path.host(cascades[1].suffix_kv_lens).tolist() == [41, 17]
    behind = step_path.host(cascades[0].suffix_kv_lens)  # the graph of three requests sees two
    assert behind.tolist() == [41, 17, 0]
    prefix = cascades[0].prefix_scheduler_metadata.buffer
    assert address(step_path, prefix) != address(step_path, cascades[0].scheduler_metadata.buffer)


def test_steps_outside_of_graphs_have_arrays_of_their_own(step_path):
    made = step(step_path, **{**GRAPHS, "max_cudagraph_capture_size": 2})
    one, two = (made.builder.build(0, made.common).scheduler_metadata.buffer for _ in range(2))
    assert address(step_path, one) != address(step_path, two)


@pytest.mark.parametrize(
    "config", [{}, {**GRAPHS, "max_cudagraph_capture_size": 2}, {**GRAPHS, "full_cuda_graphs": 0}]
)
def test_capturing_what_was_not_announced_is_refused(step_path, config):
    made = step(step_path, **config)
    with pytest.raises(ValueError, match=r"graph of 3 tokens"):
        made.builder.build_for_cudagraph_capture(made.common)


def test_a_short_step_leaves_room_for_a_long_one(step_path):
    buffers = GraphBuffers(4)
    short = buffers.rows("a", step_path.array([1, 2], np.int32))
    long = buffers.rows("a", step_path.array([7, 8, 9, 10, 11], np.int32))
    assert address(step_path, short) == address(step_path, long)


def test_more_requests_than_a_graph_was_captured_for_are_refused(step_path):
    config = {**GRAPHS, "dcp_world_size": 2}  # its lengths lie in an array of the builder
    made = step(step_path, **config)
    made.builder.build_for_cudagraph_capture(made.common)
    many = step(step_path, DECODE.replace(pad_reqs=70), **config)
    with pytest.raises(ValueError, match=r"dcp_context_kv_lens needs 73 entries"):
        made.builder.build(0, many.common)


def test_the_tail_of_a_graphs_array_is_zero(step_path):
    buffers = GraphBuffers(4)
    long = buffers.rows("a", step_path.array([7, 8, 9, 10, 11], np.int32))
    short = buffers.rows("a", step_path.array([1, 2], np.int32))
    assert address(step_path, short) == address(step_path, long)
    assert step_path.host(short).tolist() == [1, 2]
    assert step_path.host(long).tolist() == [1, 2, 0, 0, 0]
    made = SchedulerMetadata(step_path.array(np.full(9, 5), np.int32), None)
    whole = buffers.schedule("b", made).buffer
    buffers.schedule("b", SchedulerMetadata(step_path.array([3], np.int32), None))
    assert step_path.host(whole).tolist() == [3, *[0] * 8]


def test_an_array_that_a_graph_holds_does_not_move(step_path):
    buffers = GraphBuffers(1)
    small = buffers.schedule("a", SchedulerMetadata(step_path.array(np.ones(5), np.int32), None))
    large = SchedulerMetadata(step_path.array(np.ones(50), np.int32), None)
    grown = buffers.schedule("a", large).buffer
    assert address(step_path, grown) != address(step_path, small.buffer)
    buffers.captured()
    assert address(step_path, buffers.schedule("a", small).buffer) == address(step_path, grown)
    with pytest.raises(ValueError, match=r"needs 51 entries, .* of 50"):
        buffers.schedule("a", SchedulerMetadata(step_path.array(np.ones(51), np.int32), None))
