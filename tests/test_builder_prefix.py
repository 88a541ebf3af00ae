"""Shared prefixes: found in block tables, refused or split off by the builder."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from step_cases import Case, cases
from steps import Made

from cupyflash import use_cascade_attention
from cupyflash.backends.common_prefix import (
    common_prefix_blocks,
    common_prefix_len,
)
from cupyflash.shared_prefix import PrefixSchedule

DECODE = Case(((1, 40), (1, 16), (1, 70)), num_kv_heads=2, group_size=2)


def step(step_path, case=DECODE, **config):
    return Made(step_path, case, **config)


def test_a_shared_prefix_is_split_off(step_path):
    lengths = ((1, 40), (2, 33), (3, 64))
    made = step(step_path, DECODE.replace(lengths=lengths, prefix=32, pad_reqs=2, pad_tokens=1))
    metadata = made.builder.build(32, made.common)
    assert metadata.use_cascade
    assert (metadata.common_prefix_len, metadata.num_cascade_tokens) == (32, 6)
    assert step_path.host(metadata.cu_prefix_query_lens).tolist() == [0, 6]
    assert step_path.host(metadata.prefix_kv_lens).tolist() == [32]
    assert step_path.host(metadata.suffix_kv_lens).tolist() == [9, 3, 35, 0, 0]
    prefix, suffix = metadata.prefix_scheduler_metadata, metadata.scheduler_metadata
    if isinstance(prefix, PrefixSchedule):
        assert suffix is None
        return
    assert (prefix.bounds.batch, prefix.bounds.max_seqlen_q, prefix.bounds.max_seqlen_k) == (
        *(1, 6, 32),
    )
    assert (suffix.bounds.batch, suffix.bounds.max_seqlen_k) == (5, 72 - 32)
    assert prefix.bounds.window_right == -1
    assert suffix.bounds.window_right == 0


@pytest.mark.parametrize(
    ("prefix", "changes", "config", "match"),
    [
        (8, {}, {}, "multiple from 0 to 16"),
        (32, {}, {}, "multiple from 0 to 16"),  # request 1 has 16 earlier tokens
        (-16, {}, {}, "multiple from 0 to 16"),
        (16, {"causal": False}, {}, "not causal"),
        (16, {"alibi": True}, {}, "ALiBi"),
        (16, {"window": 5}, {}, r"window \(4, 0\)"),
        (16, {}, {"batch_invariant": True}, "batch_invariant"),
        (16, {}, {"dcp_world_size": 2}, "dcp_world_size=2"),
    ],
)
def test_a_prefix_that_cannot_be_shared_is_refused(step_path, prefix, changes, config, match):
    made = step(step_path, DECODE.replace(**changes), **config)
    with pytest.raises(ValueError, match=match):
        made.builder.build(prefix, made.common)


RULE = {
    "common_prefix_len": 4096,
    "query_lens": [1] * 64,
    "num_query_heads": 32,
    "num_kv_heads": 8,
    "use_alibi": False,
    "use_sliding_window": False,
    "use_local_attention": False,
    "num_sms": 132,
    "dcp_world_size": 1,
}


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, True),
        ({"common_prefix_len": 255}, False),
        ({"query_lens": [1] * 7}, False),
        ({"use_alibi": True}, False),
        ({"use_sliding_window": True}, False),
        ({"use_local_attention": True}, False),
        ({"dcp_world_size": 2}, False),
        # 32 waves of shared tiles against ceil(requests * 8 heads * 32 tiles / 132 SMs).
        ({"query_lens": [1] * 8}, False),
        ({"query_lens": [1] * 16}, False),
        ({"query_lens": [1] * 17}, True),
        ({"query_lens": [1] * 7 + [2], "common_prefix_len": 256}, True),
        ({"num_kv_heads": 32, "common_prefix_len": 256}, True),
        ({"query_lens": [1] * 8, "common_prefix_len": 256, "num_kv_heads": 2}, False),
    ],
)
def test_when_a_prefix_is_shared(step_path, changes, answer):
    asked = {**RULE, **changes}
    assert use_cascade_attention(**asked) is answer
    assert step(step_path).builder.use_cascade_attention(**asked) is answer


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ({"alibi": True}, {}),
        ({"window": 5}, {}),
        ({}, {"batch_invariant": True}),
        ({}, {"dcp_world_size": 2}),
    ],
)
def test_a_group_that_cannot_share_never_does(step_path, case, config):
    builder = step(step_path, DECODE.replace(**case), **config).builder
    assert not builder.use_cascade_attention(**RULE)


def test_the_measured_policy_needs_a_gpu_of_its_kind(step_path):
    """Elsewhere it is vLLM's rule, and what the engine hands over is shared."""
    made = step(step_path, DECODE.replace(lengths=((1, 40), (1, 33)), prefix=32),
                cascade_policy="measured")  # fmt: skip
    if step_path.name == "numpy":
        assert made.builder.use_cascade_attention(**RULE)
        assert not made.builder.use_cascade_attention(**{**RULE, "query_lens": [1] * 8})
        assert made.builder.build(32, made.common).use_cascade


def test_the_measured_policy_on_its_kind(step_path):
    if step_path.name != "numpy":
        return
    with emulated("sm_90", num_sms=132):
        case = DECODE.replace(num_kv_heads=8, group_size=4, head_size=128)
        builder = step(step_path, case, cascade_policy="measured").builder
        assert builder.use_cascade_attention(**{**RULE, "query_lens": [1] * 8})
        assert not builder.use_cascade_attention(**{**RULE, "common_prefix_len": 64})
        for refused in ("use_alibi", "use_sliding_window", "use_local_attention"):
            assert not builder.use_cascade_attention(**{**RULE, refused: True})


TABLE = np.array([[3, 5, 7, 9], [3, 5, 8, 9], [3, 5, 7, -1]], np.int32)


@pytest.mark.parametrize(
    ("table", "null", "blocks"),
    [
        (TABLE, None, 2),
        (TABLE[[0, 2]], None, 3),
        (TABLE[:1], None, 4),
        (TABLE[2:], None, 3),
        (TABLE[:0], None, 0),
        (TABLE[:, :0], None, 0),
        (TABLE, 5, 1),
        (TABLE, 3, 0),
        (np.array([[0, 1], [1, 0]], np.int32), None, 0),
    ],
)
def test_leading_blocks_that_all_rows_have(table, null, blocks):
    assert common_prefix_blocks(table, null) == blocks


@pytest.mark.parametrize(
    ("computed", "length"),
    [([48, 48, 48], 32), ([40, 33, 70], 32), ([40, 31, 70], 16), ([15, 40, 40], 0)],
)
def test_a_prefix_ends_before_the_tokens_of_this_step(computed, length):
    assert common_prefix_len(TABLE, np.array(computed), 16) == length


def test_a_table_on_a_gpu_is_not_read():
    with pytest.raises(TypeError, match="NumPy"):
        common_prefix_blocks([[1, 2]])


@given(case=cases(causal=True, window=None, alibi=False), blocks=st.integers(0, 3))
def test_a_prefix_that_is_found_can_be_built(step_path, case, blocks):
    prefix = blocks * case.block_size
    lengths = tuple((max(q, 1), n + prefix) for q, n in case.lengths)
    made = step(step_path, case.replace(lengths=lengths, prefix=prefix))
    rows, size = made.table[: len(lengths)], case.block_size
    found = common_prefix_len(rows, np.array([n for _, n in lengths]), size, null_block=0)
    assert found >= prefix
    assert found % size == 0
    if found:
        assert made.builder.build(found, made.common).use_cascade
