"""Trees, buffers and schedules that no kernel may be given: refused before any launch."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from emulator import device_array, emulated
from prefixes import SHARED, cascade, make_shared, schedule_of

from cupyflash import SideStream, cascade_attention, find_prefix_tree, get_prefix_schedule
from cupyflash.prefix_tree import PrefixTree, prefix_tree

ALL = [([0, 1, 2, 3], 64)]
BATCH = 4
GOOD = prefix_tree(ALL, BATCH).buffer


def room(count, dtype=np.int32, stride=1, skip=0):
    return np.zeros(skip + stride * count, dtype)[skip :: stride]  # fmt: skip


BUFFERS = {
    "int64": (1, GOOD.astype(np.int64), r"int64.*int32"),
    "too short": (1, GOOD[:8].copy(), r"\(8,\).*\(12,\)"),
    "of fewer levels": (3, GOOD, r"\(12,\).*\(28,\).*levels=3"),
    "two dimensions": (1, GOOD.reshape(3, 4).copy(), r"\(3, 4\)"),
    "every second": (1, room(12, stride=2), r"strides \(8,\).*contiguous"),
    "one entry": (1, np.broadcast_to(GOOD[:1], 12), r"contiguous"),
    "half a node": (1, room(12, skip=1), "multiple of 8 bytes"),
    "no levels": (0, GOOD[:4].copy(), r"levels=0.*1 to 3"),
    "four levels": (4, room(36), r"levels=4.*1 to 3"),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_is_no_tree(kind):
    levels, buffer, says = BUFFERS[kind]
    with pytest.raises(ValueError, match=says):
        PrefixTree(BATCH, levels, buffer)


@pytest.mark.parametrize(
    ("levels", "buffer"), [(1, [0] * 12), (1, None), ("1", GOOD), (True, GOOD), (1.0, GOOD)]
)
def test_what_is_no_buffer_and_no_number(levels, buffer):
    with pytest.raises(TypeError):
        PrefixTree(BATCH, levels, buffer)


@pytest.mark.parametrize("where", [room(12, stride=2), room(12, np.int64), room(12, skip=1)])
def test_nothing_is_written_to_a_buffer_that_is_no_tree(where):
    search = np.zeros((BATCH, 4), np.int32), np.full(BATCH, 60, np.int32), 16
    with emulated("sm_90") as device:
        for attempt in (
            lambda: prefix_tree(ALL, BATCH, out=where),
            lambda: find_prefix_tree(*search, levels=1, out=where),
        ):
            with pytest.raises(ValueError, match="tree"):
                attempt()
        assert not device.reports
    assert not where.any()


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ([([0, 1], -64)], ValueError), ([([0, 1], 64.7)], TypeError),
        ([([0, 1], 2**40)], ValueError),
        ([([0, 1.5], 64)], TypeError), ([(["a"], 64)], TypeError), ([([0, 4], 64)], ValueError),
        ([([0, 1], keys) for keys in (16, 32, 48, 64)], ValueError),
    ],
)  # fmt: skip
def test_groups_that_are_none(groups, error):
    with pytest.raises(error):
        prefix_tree(groups, BATCH)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 16.5}, {"block_size": "16"}, {"block_size": 2**40}, {"block_size": 0},
        {"null_block": 2**40}, {"null_block": 1.5}, {"levels": True}, {"levels": 2.0},
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_device", [False, True])
def test_numbers_of_a_search(change, on_device):
    given = {
        "block_table": np.zeros((BATCH, 4), np.int32), "seqused_k": np.full(BATCH, 60, np.int32),
        "block_size": 16, **change,
    }  # fmt: skip
    with emulated("sm_90") as device:
        with pytest.raises((TypeError, ValueError), match=next(iter(change))):
            find_prefix_tree(**given)
        assert not device.reports


def test_a_tree_lies_apart_from_what_is_searched():
    memory = np.zeros(64, np.int32)
    table, lengths = memory[:16].reshape(BATCH, 4), np.full(BATCH, 60, np.int32)
    with emulated("sm_90") as device:
        with pytest.raises(ValueError, match="block_table"):
            find_prefix_tree(table, lengths, 16, levels=1, out=memory[8:20])
        assert not device.reports


def schedule(inputs, **changes):
    args, case = inputs.args, inputs.case
    return get_prefix_schedule(
        BATCH, BATCH, 1, 200, case.num_heads_q, case.num_heads_kv, case.head_dim,
        args["seqused_k"], case.kv_type, args["cu_seqlens_q"], case.page_size, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "common_prefix_len=0"), ({"common_prefix_len": -16}, "at least 0"),
        ({"common_prefix_len": 17}, "nearest is 16"), ({"common_prefix_len": 208}, "must hold"),
        ({"prefix_tree": prefix_tree([], 3)}, "3 requests, the calls of 4"),
        ({"prefix_tree": prefix_tree(ALL, 4), "common_prefix_len": 16}, "use 0"),
        ({"prefix_tree": 1}, "prefix_tree is int"),
    ],
)  # fmt: skip
def test_schedules_that_no_call_could_use(changes, says):
    inputs, _ = make_shared(SHARED, ALL)
    with emulated("sm_90") as device:
        with pytest.raises((TypeError, ValueError), match=says):
            schedule(inputs, **changes)
        assert not device.reports


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (room(1 << 20, np.uint8, stride=2), "contiguous"),
        (room(1 << 20), r"int32.*uint8"),
        (room(1 << 20, np.uint8, skip=1), "multiple of 16 bytes"),
        (room(1 << 20, np.uint8).reshape(2, -1), r"\(2, 524288\)"),
    ],
)
def test_memory_that_is_none_of_a_schedule(out, says):
    inputs, tree = make_shared(SHARED, ALL)
    with emulated("sm_90") as device:
        with pytest.raises(ValueError, match=says):
            schedule(inputs, prefix_tree=tree, out=out)
        assert not device.reports
    assert not out.any()


def test_a_schedule_that_is_made_behind_a_join_is_waited_for():
    inputs, tree = make_shared(SHARED, ALL)
    with emulated("sm_90", num_sms=2) as device:
        ordered = []
        device.order = lambda first, then: ordered.append((first, then))
        side = SideStream(inputs.args["seqused_k"])
        side.join()
        made = schedule_of(inputs, tree, stream=side)
        ordered.clear()
        cascade(inputs, tree, prefix_scheduler_metadata=made)
        assert ordered == [(1, 0)]


def test_a_tree_is_written_where_it_was():
    memory = device_array(12, np.int32)
    assert prefix_tree(ALL, BATCH, out=memory).buffer is memory
    np.testing.assert_array_equal(memory, GOOD)


def test_results_lie_apart_from_trees_and_schedules():
    inputs, tree = make_shared(SHARED, ALL)
    out = inputs.placed["out"].view
    shape, dtype, nbytes = out.shape, out.dtype, out.size * 2
    with emulated("sm_90") as device:
        memory = device_array(1 << 20, np.uint8)
        made = schedule_of(inputs, tree, out=memory)
        inside = memory[:48].view(np.int32)
        queued = len(device.reports)
        with pytest.raises(ValueError, match="overlaps the schedule"):
            attend(inputs, memory[:nbytes].view(dtype).reshape(shape), tree, made)
        inside[:] = GOOD
        with pytest.raises(ValueError, match="output overlaps prefix_tree"):
            attend(inputs, memory[:nbytes].view(dtype).reshape(shape), PrefixTree(4, 1, inside))
        assert len(device.reports) == queued
    np.testing.assert_array_equal(inside, GOOD)


def attend(inputs, out, tree, made=None, max_query_len=1):
    a = inputs.args
    return cascade_attention(
        out, a["q"], a["k"], a["v"], a["cu_seqlens_q"], max_query_len, None, None, a["seqused_k"],
        201, None, None, None, None, a["block_table"], 0, 0, None, made, prefix_tree=tree,
    )  # fmt: skip


def test_a_bound_of_no_queries_is_planned():
    """It was a division by zero."""
    inputs, tree = make_shared(SHARED.replace(lengths=((0, 200),) * 4), ALL)
    args, case = inputs.args, inputs.case
    queries = np.zeros((3, case.num_heads_q, case.head_dim), args["q"].dtype)
    inputs.args["q"] = queries
    with emulated("sm_90", num_sms=2):
        out = np.full_like(queries, 7)
        attend(inputs, out, tree, max_query_len=0)
        np.testing.assert_array_equal(out, np.full_like(queries, 7))
        assert (
            get_prefix_schedule(
                BATCH, 3, 0, 200, 8, 2, 128, args["seqused_k"], "bf16", args["cu_seqlens_q"], 16,
                prefix_tree=tree,
            )
            is None
        )  # fmt: skip


@pytest.mark.parametrize("on_device", [False, True])
def test_a_group_that_shares_a_part_of_a_block(on_device, monkeypatch):
    """The kernel goes by whole pages: results were wrong."""
    inputs, tree = make_shared(SHARED, [([0, 1], 64), ([2, 3], 24)])
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    place = emulated("sm_90") if on_device else nullcontext()
    with place, pytest.raises(ValueError, match=r"24 tokens.*nearest is 16"):
        attend(inputs, inputs.placed["out"].view, tree)
