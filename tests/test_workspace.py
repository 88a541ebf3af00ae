"""Scratch memory: shared by the calls of a stream, pinned by captures, given back on demand."""

from __future__ import annotations

import itertools
import threading
import weakref

import numpy as np
import pytest

from cupyflash.runtime.errors import CaptureError
from cupyflash.runtime.launch import prepare, stream_handle
from cupyflash.runtime.plan import Plan
from cupyflash.runtime.recording import recorded
from cupyflash.runtime.variant import Variant
from cupyflash.runtime.workspace import COUNTERS, MAILBOX, free_workspaces, scratch_of

MIB = 1 << 20
COUNTER_BYTES = 4 * (COUNTERS + MAILBOX)


class Block(np.ndarray):
    """An array that can be watched as it goes."""


class Device:
    def __init__(self):
        self.kernels = {}
        self.capturing = False
        self.stream = 7
        self.blocks = []

    def compile(self, variant):
        return variant.symbol

    def is_capturing(self, stream):
        return self.capturing

    def current_stream(self):
        return self.stream

    def empty(self, shape, dtype, stream):
        block = np.empty(shape, dtype).view(Block)
        self.blocks.append(weakref.ref(block))
        return block

    @property
    def alive(self):
        return [ref().nbytes for ref in self.blocks if ref() is not None]


@pytest.fixture
def device():
    yield Device()
    free_workspaces()


def reserve(device, nbytes, stream=None):
    with scratch_of(device, stream) as scratch:
        return scratch.reserve(nbytes)


def test_calls_of_a_stream_share_a_block(device):
    first = reserve(device, 100)
    assert first.dtype == np.uint8
    assert reserve(device, MIB) is first
    assert reserve(device, 5, stream=7) is first  # the current stream, by its handle
    assert reserve(device, 5, stream=8) is not first


def test_it_grows_and_lets_the_old_block_go(device):
    reserve(device, 3 * MIB)
    assert reserve(device, 3 * MIB + 1).nbytes == 6 * MIB
    assert device.alive == [COUNTER_BYTES, 6 * MIB]
    assert reserve(device, 100 * MIB).nbytes == 100 * MIB


def test_counters_come_with_the_first_block_and_are_zero(device):
    with scratch_of(device, None) as scratch:
        assert scratch.counters is None
        scratch.reserve(5)
        counters = scratch.counters
        assert counters.dtype == np.uint32
        assert not counters.any()
        scratch.reserve(3 * MIB)
        assert scratch.counters is counters


def test_what_a_call_recorded_serves_while_its_memory_stays(device):
    places = itertools.count()
    device.pointer = lambda array: vars(array).setdefault("place", next(places))
    with scratch_of(device, None) as scratch:
        first = recorded(scratch.reserve, 2 * MIB)
        assert scratch.still_serves(first)
        larger = recorded(scratch.reserve, 5 * MIB)
        assert not scratch.still_serves(first)
        assert scratch.still_serves(larger)
        smaller = recorded(scratch.reserve, 5)
        assert scratch.still_serves(smaller)
        smaller.reserved(scratch.nbytes + 1, *smaller.places)
        assert not scratch.still_serves(smaller)
    free_workspaces()
    with scratch_of(device, None) as scratch:
        device.pointer = lambda array: next(iter(larger.places))[0]  # less memory, the same place
        recorded(scratch.reserve, 5)
        assert not scratch.still_serves(larger)


def test_growth_does_not_double_large_blocks(device):
    reserve(device, 300 * MIB)
    assert reserve(device, 301 * MIB).nbytes == 301 * MIB


def test_a_capture_refuses_to_allocate_and_names_warmup(device):
    device.capturing = True
    with pytest.raises(CaptureError, match=r"2097152 bytes of workspace .*cupyflash\.warmup"):
        reserve(device, 2 * MIB)


def test_a_block_that_a_capture_has_seen_stays(device):
    captured = reserve(device, MIB)
    device.capturing = True
    assert reserve(device, MIB) is captured
    del captured
    device.capturing = False
    reserve(device, 5 * MIB)
    reserve(device, 50 * MIB)
    assert device.alive == [COUNTER_BYTES, MIB, 50 * MIB]
    assert scratch_of(device, None).nbytes == 51 * MIB
    assert free_workspaces() == 51 * MIB
    assert device.alive == []
    assert reserve(device, 1).nbytes == MIB


def test_the_per_thread_stream_is_another_stream_in_each_thread(device):
    device.stream = 2
    mine, theirs = reserve(device, 1), []
    thread = threading.Thread(target=lambda: theirs.append(reserve(device, 1)))
    thread.start()
    thread.join()
    assert theirs[0] is not mine
    assert reserve(device, 1) is mine


def test_the_launches_of_one_call_are_not_interleaved_with_those_of_another(device):
    order = []

    def call(name):
        with scratch_of(device, None) as scratch:
            for part in range(3):
                scratch.reserve(10)
                order.append((name, part))
                ready.wait(0.05)

    ready = threading.Event()
    threads = [threading.Thread(target=call, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [part for _, part in order] == [0, 1, 2] * 4
    assert all(len({name for name, _ in order[i : i + 3]}) == 1 for i in range(0, 12, 3))


def test_prepare_loads_and_allocates_for_a_capture(device):
    variants = [Variant("a.cu", name, "sm_90", ()) for name in ("a", "b")]
    one = (1, 1, 1)
    plans = [Plan(v, one, one, 0, n * MIB) for v, n in zip(variants, (4, 2), strict=True)]
    prepare(device, plans, 9)
    device.capturing = True
    assert device.kernels == {variants[0]: "a", variants[1]: "b"}
    assert reserve(device, 4 * MIB, 9).nbytes == 4 * MIB


def test_streams_are_handles_or_know_theirs():
    class CuPys:
        ptr = 5

    class Standard:
        def __cuda_stream__(self):
            return 0, 6

    assert [stream_handle(s) for s in (None, 3, CuPys(), Standard())] == [None, 3, 5, 6]
    with pytest.raises(TypeError, match="stream is str"):
        stream_handle("main")
