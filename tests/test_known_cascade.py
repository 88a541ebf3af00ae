"""Shared prefixes in one launch, queued as an earlier call was: when, and when they must not be."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from stand_in import Array, forget
from test_known_call import Gpu, launches

from cupyflash import SideStream, cascade_attention, free_workspaces, known_cascade
from cupyflash.prefix_tree import PrefixTree
from cupyflash.runtime.device import use_device
from cupyflash.shared_prefix import get_prefix_schedule

BATCH = 4
NEEDED = {"common_prefix_len": 32, "max_kv_len": 64}


@pytest.fixture
def gpu(monkeypatch):
    pytest.importorskip("cupy")  # is asked how many GPUs there are
    forget()
    monkeypatch.setattr("cupyflash.runtime.workspace.on_stream", lambda *a: nullcontext())
    monkeypatch.setattr("cupyflash.runtime.workspace._scratch", {})
    with use_device(Gpu((9, 0))) as found:
        yield found


def at(place, shape, dtype=np.float16):
    return Array(shape, dtype, place << 20)


def arguments(**changes):
    given = {
        "output": at(1, (BATCH, 8, 64)),
        "query": at(2, (BATCH, 8, 64)),
        "key_cache": at(3, (9, 16, 2, 64)),
        "value_cache": at(4, (9, 16, 2, 64)),
        "cu_query_lens": at(5, (BATCH + 1,), np.int32),
        "max_query_len": 1,
        "cu_prefix_query_lens": at(6, (2,), np.int32),
        "prefix_kv_lens": at(7, (1,), np.int32),
        "suffix_kv_lens": at(8, (BATCH,), np.int32),
        "softmax_scale": None,
        "alibi_slopes": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "block_table": at(9, (BATCH, 4), np.int32),
        "max_num_splits": 0,
        "fa_version": None,
        **NEEDED,
    }
    return {**given, **changes}


def call(**changes):
    return lambda: cascade_attention(**arguments(**changes))


def tree(place=10, levels=1):
    return PrefixTree(BATCH, levels, at(place, ((2 * levels + 1) * BATCH,), np.int32))


def with_tree(**changes):
    return call(**{"prefix_tree": tree(), "common_prefix_len": 0, **changes})


def schedule(place=12, stream=None, **changes):
    asked = {"common_prefix_len": 32, "num_heads_kv": 2, **changes}
    return get_prefix_schedule(
        BATCH, BATCH, 1, 64, 8, headdim=64, suffix_kv_lens=at(8, (BATCH,), np.int32),
        qkv_dtype="fp16", cu_seqlens_q=at(5, (BATCH + 1,), np.int32), page_size=16,
        out=at(place, (1 << 25,), np.uint8), stream=stream, **asked,
    )  # fmt: skip


def settled(gpu, attention):
    """What a call queues, queued as it was."""
    for _ in range(3):
        found = launches(gpu, attention)
    assert gpu.again
    return found


FORMS = {
    "prefix": {},
    "tree": {"prefix_tree": tree(), "common_prefix_len": 0},
    "window": {"sliding_window": (40, 0)},
    "sink and cap": {"s_aux": at(20, (8,), np.float32), "logits_soft_cap": 30.0},
    "ALiBi": {"alibi_slopes": at(21, (8,), np.float32)},
}


@pytest.mark.parametrize("form", FORMS)
def test_equal_calls_are_queued_as_the_first_was(gpu, monkeypatch, form):
    attention = call(**FORMS[form])
    first = launches(gpu, attention)
    assert len(first) == 1
    monkeypatch.setattr("cupyflash.cascade.attend", None)
    for times in (1, 2):
        assert launches(gpu, attention) == first
        assert gpu.again == times


def test_a_schedule_that_was_made_ahead_is_read_where_it_is(gpu):
    made = {"prefix_scheduler_metadata": schedule()}
    first = settled(gpu, call(**made))
    again = gpu.again
    assert launches(gpu, call(**made)) == first
    assert gpu.again == again + 1
    other = launches(gpu, call(prefix_scheduler_metadata=schedule(place=50)))
    assert other != first
    assert gpu.again == again + 1
    assert launches(gpu, call()) != first


def test_a_schedule_of_other_calls_is_refused(gpu):
    settled(gpu, call(prefix_scheduler_metadata=schedule()))
    wrong = replace(schedule(), needs=("others",))
    queued = len(gpu.launches)
    for _ in range(2):
        with pytest.raises(ValueError, match="made for other calls"):
            call(prefix_scheduler_metadata=wrong)()
    assert len(gpu.launches) == queued


def test_a_side_stream_is_waited_for_by_the_first_call_only(gpu):
    ordered = []
    gpu.beside = lambda stream: 77
    gpu.order = lambda before, after: ordered.append((before, after))
    attention = call(prefix_scheduler_metadata=schedule())
    settled(gpu, attention)
    for _ in range(2):
        side = SideStream(at(8, (BATCH,), np.int32))
        made = schedule(stream=side)
        ordered.clear()
        for _ in range(3):
            call(prefix_scheduler_metadata=made)()
        assert ordered == [(77, 0)]


ARRAYS = (
    "output", "query", "key_cache", "value_cache", "cu_query_lens", "suffix_kv_lens", "block_table",
)  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_elsewhere_is_where_it_is(gpu, name):
    first = settled(gpu, with_tree())
    again, like = gpu.again, arguments()[name]
    moved = with_tree(**{name: Array(like.shape, like.dtype, 77 << 20)})
    found = launches(gpu, moved)
    assert gpu.again == again
    assert found != first
    assert launches(gpu, with_tree()) == first
    assert launches(gpu, moved) == found
    assert gpu.again == again + 2


@pytest.mark.parametrize("change", [
    {"prefix_tree": tree(place=60)}, {"prefix_tree": tree(levels=2)}, {"softmax_scale": 0.5},
    {"logits_soft_cap": 2.0}, {"sliding_window": (30, 0)}, {"max_query_len": 2},
    {"max_num_splits": 7}, {"alibi_slopes": at(21, (8,), np.float32)},
    {"alibi_slopes": at(21, (BATCH, 8), np.float32)}, {"s_aux": at(22, (8,), np.float32)},
    {"prefix_tree": None, "common_prefix_len": 16}, {"prefix_tree": None, "common_prefix_len": 32},
    {"stream": 5},
])  # fmt: skip
def test_another_option_is_another_call(gpu, change):
    first = settled(gpu, with_tree())
    again = gpu.again
    found = launches(gpu, with_tree(**change))
    assert gpu.again == again
    assert found != first
    forget()
    assert launches(gpu, with_tree(**change)) == found


def test_descales_are_those_of_the_call(gpu):
    cache = {name: at(place, (9, 16, 2, 64), np.uint8)
             for name, place in (("key_cache", 3), ("value_cache", 4))}  # fmt: skip
    per_request, one = at(30, (BATCH, 2), np.float32), at(31, (1,), np.float32)
    seen = [
        settled(gpu, with_tree(**cache, k_descale=k, v_descale=v))
        for k, v in ((None, None), (2.0, None), (2.0, 3.0), (per_request, 3.0), (one, one))
    ]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_scratch_memory_that_moved_is_used_where_it_is(gpu):
    first = settled(gpu, call())
    again = gpu.again
    assert free_workspaces()
    moved = launches(gpu, call())
    assert gpu.again == again
    assert moved != first
    assert launches(gpu, call()) == moved


@pytest.mark.parametrize("change", [
    {"max_query_len": 1.0}, {"max_kv_len": True}, {"max_num_splits": True}, {"fa_version": 3.0},
    {"sliding_window": (-1.0, -1)}, {"logits_soft_cap": False}, {"fp8_dtype": ["e4m3"]},
    {"stream": "3"}, {"suffix_kv_lens": [1, 2, 3, 4]}, {"prefix_tree": 3},
    {"prefix_tree": PrefixTree(3, 1, at(10, (9,), np.int32))}, {"common_prefix_len": 16},
    {"block_table": at(9, (BATCH,), np.int32)}, {"query": at(2, (BATCH, 8, 48))},
])  # fmt: skip
def test_a_wrong_call_like_a_known_one_is_refused(gpu, change):
    right = {"sliding_window": (-1, -1), "fa_version": 3, "logits_soft_cap": 0}
    settled(gpu, with_tree(**right))
    queued = len(gpu.launches)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            with_tree(**{**right, **change})()
    assert len(gpu.launches) == queued


@pytest.mark.parametrize("change", [{"max_num_splits": 1}, {"fa_version": 2}])
def test_what_is_more_than_one_launch_is_not_kept(gpu, monkeypatch, change):
    monkeypatch.setattr("cupyflash.cascade_passes._two_levels", lambda *a: None)
    call(**change)()
    assert not known_cascade._known


def test_checked_mode_is_not_passed_by(gpu, monkeypatch):
    settled(gpu, with_tree())
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    monkeypatch.setattr("cupyflash.cascade_passes.check_values", lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        with_tree()()


def test_no_more_calls_than_are_kept(gpu, monkeypatch):
    monkeypatch.setattr(known_cascade, "_MOST_CALLS", 3)
    for _ in range(2):
        for scale in range(1, 9):
            with_tree(softmax_scale=scale / 8)()
            assert len(known_cascade._known) <= 3


@pytest.mark.parametrize("name", ["prefix_scheduler_metadata", "suffix_scheduler_metadata"])
def test_a_schedule_of_a_pass_may_be_its_buffer(gpu, name):
    wrong, queued = np.zeros(8, np.int32), len(gpu.launches)
    with pytest.raises(TypeError, match="scheduler_metadata"):
        call(**{name: wrong})()
    assert len(gpu.launches) == queued


@pytest.mark.parametrize("wrong", [None, 1.0, "query"])
def test_a_query_that_is_no_array_is_named(gpu, monkeypatch, wrong):
    # Of a GPU, the array says which one it is.
    monkeypatch.setattr("cupyflash.known_cascade.active_device", lambda: None)
    monkeypatch.setattr("cupyflash.known_cascade.device_for", lambda array: (array.data, gpu)[1])
    for tree_or_not in (call, with_tree):
        with pytest.raises(TypeError, match="query"):
            tree_or_not(query=wrong)()


def test_a_table_without_room_for_the_prefix_is_refused(gpu):
    call(block_table=at(9, (BATCH, 2), np.int32))()
    queued = len(gpu.launches)
    with pytest.raises(ValueError, match="1 columns; common_prefix_len=32 takes 2 blocks"):
        call(block_table=at(9, (BATCH, 1), np.int32))()
    assert len(gpu.launches) == queued
