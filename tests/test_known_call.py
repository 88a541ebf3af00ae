"""Calls that are queued as an earlier one was: when they are, and when they must not be."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from stand_in import Array, StandIn, decode, forget

from cupyflash import fa_version, flash_attn_varlen_func, free_workspaces, kept_launches, known_call
from cupyflash.attention import describe_call
from cupyflash.runtime import workspace
from cupyflash.runtime.device import use_device
from cupyflash.runtime.errors import CaptureError
from cupyflash.runtime.gpu_key import gpu_key
from cupyflash.scheduler_metadata import SchedulerMetadata, _asked

WORKSPACE = Array((1 << 20,), np.uint8, 3 << 20)


class Gpu(StandIn):
    """A stand-in whose allocations have addresses of their own."""

    def __init__(self, capability):
        super().__init__(capability)
        self.next, self.capturing = 9 << 24, False

    def empty(self, shape, dtype, stream):
        if self.capturing:
            raise CaptureError("an array would be allocated")
        self.next += 1 << 24
        return Array(shape, dtype, self.next)

    def is_capturing(self, stream):
        return self.capturing


@pytest.fixture(params=[(8, 0), (9, 0)])
def gpu(request, monkeypatch):
    pytest.importorskip("cupy")  # is asked how many GPUs there are
    forget()
    monkeypatch.setattr(Array, "fill", lambda self, value: None, raising=False)
    monkeypatch.setattr(workspace, "on_stream", lambda *a: nullcontext())
    monkeypatch.setattr(workspace, "_scratch", {})
    with use_device(Gpu(request.param)) as found:
        yield found


def call(**changes):
    """With results of its own, so that equal calls have equal addresses."""
    given = {"out": Array((2, 8, 64), np.float16, 5 << 20), **changes}
    return lambda: flash_attn_varlen_func(**decode(**given))


def launches(gpu, attention):
    first = len(gpu.launches)
    attention()
    return [
        (kernel, plan, args.values, stream) for kernel, plan, args, stream in gpu.launches[first:]
    ]


def refuse_to_plan(monkeypatch):
    for known in known_call._known.values():
        monkeypatch.setattr(known, "launch", None)


@pytest.mark.parametrize("changes", [
    {}, {"num_splits": 0, "max_seqlen_k": 1 << 16}, {"max_seqlen_q": 64},
    {"num_splits": 0, "max_seqlen_k": 1 << 16, "workspace": WORKSPACE},
    {"return_softmax_lse": True, "lse": Array((8, 2), np.float32, 6 << 20)},
])  # fmt: skip
def test_equal_calls_are_queued_as_the_first_was(gpu, monkeypatch, changes):
    attention = call(**changes)
    first = launches(gpu, attention)
    assert first
    assert not gpu.again
    assert launches(gpu, attention) == first
    refuse_to_plan(monkeypatch)
    for _ in range(2):
        assert launches(gpu, attention) == first
    assert gpu.again == 2 * len(first)


ARRAYS = (
    "q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table", "out", "lse", "alibi_slopes",
    "s_aux", "workspace",
)  # fmt: skip


def with_all(**changes):
    return call(
        num_splits=0, max_seqlen_k=1 << 16, workspace=changes.pop("workspace", WORKSPACE),
        return_softmax_lse=True, lse=changes.pop("lse", Array((8, 2), np.float32, 6 << 20)),
        alibi_slopes=changes.pop("alibi_slopes", Array((8,), np.float32, 7 << 20)),
        s_aux=changes.pop("s_aux", Array((8,), np.float32, 8 << 20)), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_elsewhere_is_where_it_is(gpu, name):
    own = {**decode(), "out": Array((2, 8, 64), np.float16), "lse": Array((8, 2), np.float32)}
    own |= {n: Array((8,), np.float32) for n in ("alibi_slopes", "s_aux")} | {
        "workspace": WORKSPACE
    }
    for _ in range(3):
        first = launches(gpu, with_all())
    again = gpu.again
    assert again
    like = own[name]
    moved = with_all(**{name: Array(like.shape, like.dtype, 77 << 20)})
    found = launches(gpu, moved)
    assert gpu.again == again
    assert len(found) == len(first)
    assert (77 << 20).to_bytes(8, "little") in b"".join(found[-1][2] + found[0][2])
    assert launches(gpu, with_all()) == first
    assert launches(gpu, moved) == found


@pytest.mark.parametrize("change", [
    {"softmax_scale": 0.5}, {"causal": True}, {"window_size": (3, 0)}, {"softcap": 2.0},
    {"max_seqlen_q": 2}, {"max_seqlen_k": 32}, {"num_splits": 2, "max_seqlen_k": 1 << 16},
    {"fa_version": 2}, {"batch_invariant": True}, {"lse": Array((8, 2), np.float32, 6 << 20)},
    {"workspace": WORKSPACE}, {"stream": 5},
    {"q": Array((2, 8, 64), np.float16, strides=(2048, 128, 2))},
])  # fmt: skip
def test_another_option_is_another_call(gpu, change):
    for _ in range(3):
        launches(gpu, call())
    again = gpu.again
    assert again
    found = launches(gpu, call(**change))
    assert gpu.again == again
    known_call._known.clear(), kept_launches._recordings.clear()
    launches(gpu, call())
    assert launches(gpu, call(**change))[0][1:] == found[0][1:]


def test_the_version_of_a_block_and_of_the_environment_is_the_calls(monkeypatch):
    forget()
    with use_device(Gpu((9, 0))) as gpu:
        for _ in range(3):
            (hopper,) = launches(gpu, call())
        assert hopper[1].variant.arch == "sm_90a"
        with fa_version(2):
            assert launches(gpu, call())[0][1].variant.arch == "sm_90"
        assert launches(gpu, call()) == [hopper]
        monkeypatch.setenv("CUPYFLASH_FA_VERSION", "2")
        assert launches(gpu, call())[0][1].variant.arch == "sm_90"
        monkeypatch.delenv("CUPYFLASH_FA_VERSION")
        assert launches(gpu, call()) == [hopper]


def test_checked_mode_is_not_passed_by(gpu, monkeypatch):
    for _ in range(3):
        call()()
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    monkeypatch.setattr("cupyflash.attention.check_values", lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call()()


SPLIT = {"num_splits": 0, "max_seqlen_k": 1 << 16}


def test_scratch_memory_that_moved_is_used_where_it_is(gpu):
    attention = call(**SPLIT)
    first, again = [launches(gpu, attention) for _ in range(3)][-1], gpu.again
    assert again
    assert free_workspaces()
    moved = launches(gpu, attention)
    assert gpu.again == again
    assert moved != first
    assert launches(gpu, attention) == moved


def test_a_block_that_a_capture_has_seen_by_a_known_call_is_kept(gpu):
    attention = call(**SPLIT)
    first = [launches(gpu, attention) for _ in range(3)][-1]
    gpu.capturing = True
    assert launches(gpu, attention) == first
    with pytest.raises(CaptureError):
        flash_attn_varlen_func(**decode(**SPLIT))
    gpu.capturing = False
    (scratch,) = workspace._scratch.values()
    block = scratch._block
    scratch.reserve(scratch.nbytes + 1)
    assert scratch._pinned == [block]
    assert launches(gpu, attention) != first


def test_what_cannot_be_queued_again_is_queued_anew(gpu):
    first = [launches(gpu, call()) for _ in range(3)][-1]
    gpu.status = 201
    again, found = gpu.again, launches(gpu, call())
    assert (gpu.again, found) == (again + 1, first)


def test_devices_and_streams_have_launches_of_their_own(gpu):
    for _ in range(3):
        first = launches(gpu, call())
    with use_device(Gpu(gpu.info.capability)) as other:
        assert launches(other, call()) == first
        assert not other.again
    assert launches(gpu, call(stream=3))[0][3] == 3
    assert launches(gpu, call()) == first


@pytest.mark.parametrize("change", [
    {"max_seqlen_q": 1.0}, {"max_seqlen_k": True}, {"causal": 0}, {"num_splits": True},
    {"window_size": (-1.0, -1)}, {"window_size": [-1, -1.0]}, {"softcap": False},
    {"fa_version": 2.0}, {"batch_invariant": 0}, {"fp8_dtype": ["e4m3"]}, {"stream": "3"},
    {"k": Array((9, 16, 2, 64), np.float16, ordinal=1)}, {"seqused_k": [3, 4]},
    {"workspace": Array((1 << 20,), np.uint8, (3 << 20) + 8)}, {"dropout_p": 0.5},
    {"return_attn_probs": True}, {"scheduler_metadata": Array((1,), np.int32)},
])  # fmt: skip
def test_a_wrong_call_like_a_known_one_is_refused(gpu, change):
    right = {"window_size": (-1, -1), "fa_version": 2, "workspace": WORKSPACE}
    for _ in range(3):
        call(**right)()
    queued = len(gpu.launches)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            call(**{**right, **change})()
    assert len(gpu.launches) == queued


def test_a_schedule_is_for_the_bounds_of_its_call(gpu):
    def schedule(ptr=3 << 20, **changes):
        bounds = _asked(describe_call(**decode(**changes)).problem)
        return SchedulerMetadata(Array((64,), np.int32, ptr), bounds)

    right = call(scheduler_metadata=schedule())
    first = [launches(gpu, right) for _ in range(3)][-1]
    again = gpu.again
    assert again
    assert launches(gpu, call(scheduler_metadata=schedule())) == first
    assert gpu.again == again + 1
    assert launches(gpu, call(scheduler_metadata=schedule(ptr=4 << 20)))
    assert gpu.again == again + 1
    queued = len(gpu.launches)
    with pytest.raises(ValueError, match="max_seqlen_k=128"):
        call(scheduler_metadata=schedule(max_seqlen_k=128))()
    assert len(gpu.launches) == queued
    assert launches(gpu, call(scheduler_metadata=schedule().buffer)) == first


def test_a_scale_in_an_array_is_a_scale_each_time(gpu):
    calls = [
        launches(gpu, call(softmax_scale=scale)) for scale in (2.0, np.array(2.0), np.array(2.0))
    ]
    assert calls[0] == calls[1] == calls[2]


def test_a_key_of_cupys_own_arrays():
    cupy = pytest.importorskip("cupy")
    host = np.zeros(1 << 12, np.uint8)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)

    def array(shape, dtype=np.float16):
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    a = array((4, 8, 16))
    others = (
        array((4, 16, 8)), array((4, 8, 16), np.int16), a[:, ::2], a[::2], a.transpose(1, 0, 2),
        None, 1.0, array((5, 8, 16))[:, :, :8],
    )  # fmt: skip
    keys = [gpu_key((x,), ()) for x in (a, *others)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert gpu_key((array((5, 8, 16))[:4],), ()) == keys[0]
    for wrong in (np.zeros(3), [1], 1, "a", memory):
        assert gpu_key((wrong,), ()) is None


def test_more_calls_and_places_than_are_kept(gpu, monkeypatch):
    monkeypatch.setattr(known_call, "_MOST_CALLS", 3)
    monkeypatch.setattr(kept_launches, "_MOST_PLACES", 3)
    for _ in range(2):
        for batch in range(1, 9):
            for ptr in (1 << 21, 1 << 22):
                flash_attn_varlen_func(**decode(batch=batch, ptr=ptr))
                assert len(known_call._known) <= 3
                assert len(kept_launches._recordings) <= 3
