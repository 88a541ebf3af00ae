"""What only a GPU can show of the compile step and the small kernels."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from stand_in import forget

import cupyflash
from cupyflash import merge_attn_states, reshape_and_cache_flash
from cupyflash.runtime.compile import kernel_source, native_arch
from cupyflash.runtime.cupy_device import LoadedKernel, cupy_device
from cupyflash.runtime.dtypes import FP16
from cupyflash.runtime.errors import CaptureError
from cupyflash.runtime.launch import prepare
from cupyflash.runtime.merge_plan import make_merge_plan, merge_variant
from cupyflash.runtime.workspace import scratch_of
from cupyflash.testing import expect_merge, write_oracle

pytestmark = pytest.mark.gpu
SHAPE = (37, 4, 64)


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture
def device(cp):
    return cupy_device(cp.cuda.Device().id)


@contextmanager
def nothing_loaded(device):
    """A device that has loaded no kernel yet."""
    kept, device.kernels = device.kernels, {}
    forget()
    try:
        yield
    finally:
        device.kernels = kept


def states(cp, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (
            cp.asarray(rng.standard_normal(SHAPE).astype(np.float16)),
            cp.asarray(rng.uniform(-5, 5, SHAPE[1::-1]).astype(np.float32)),
        )
        for _ in range(2)
    ]


def results(cp):
    return cp.full(SHAPE, np.nan, np.float16), cp.full(SHAPE[1::-1], np.nan, np.float32)


def merge(cp, pair, **options):
    out, lse = results(cp)
    merge_attn_states(out, *pair[0], *pair[1], lse, **options)
    return out, lse


def check(pair, out, lse):
    expected = expect_merge(*[(o.get(), s.get()) for o, s in pair], out_dtype="fp16")
    expected.check(out.get(), lse.get())


def test_the_source_through_rawmodule_has_the_same_bits(cp, device):
    pair = states(cp)
    ours = merge(cp, pair)
    variant = merge_variant(native_arch(device.info.capability), FP16, FP16)
    source, options = kernel_source(variant)
    raw = cp.RawModule(code=source, options=options).get_function(variant.symbol)
    with nothing_loaded(device):
        device.kernels[variant] = LoadedKernel(raw.kernel)
        theirs = merge(cp, pair)
        assert list(device.kernels) == [variant]
    for a, b in zip(ours, theirs, strict=True):
        assert a.get().tobytes() == b.get().tobytes()


def captured(cp, stream, call):
    """The graph of a call, or its error after the capture has ended."""
    with stream:
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
    return graph


def test_a_capture_refuses_to_load_until_it_is_prepared(cp, device):
    pair, (out, lse) = states(cp), results(cp)
    stream = cp.cuda.Stream(non_blocking=True)

    def call():
        merge_attn_states(out, *pair[0], *pair[1], lse)

    with nothing_loaded(device):
        with pytest.raises(CaptureError, match=r"merge_attn_states_fp16_fp16.*cupyflash\.warmup"):
            captured(cp, stream, call)
        arch = native_arch(device.info.capability)
        prepare(device, [make_merge_plan(arch, FP16, FP16, *SHAPE, True)], stream.ptr)
        graph = captured(cp, stream, call)
    for seed in (1, 2):
        for (new_out, new_lse), (old_out, old_lse) in zip(states(cp, seed), pair, strict=True):
            old_out[...], old_lse[...] = new_out, new_lse
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(pair, out, lse)


def test_a_captured_write_uses_the_slots_of_each_replay(cp):
    rng = np.random.default_rng(3)
    key = cp.asarray(rng.standard_normal((5, 2, 64)).astype(np.float16))
    slots = cp.asarray([3, 1, 2, -1, -1])
    caches = [cp.zeros((4, 2, 2, 64), np.float16) for _ in range(2)]
    stream = cp.cuda.Stream(non_blocking=True)

    def call():
        reshape_and_cache_flash(key, key, *caches, slots, "auto", 1.0, 1.0)

    call()
    cp.cuda.Device().synchronize()
    graph = captured(cp, stream, call)
    for new in ([7, 0, -1, 4, -1], [-1, -1, -1, -1, 5]):
        before = caches[0].get()
        slots[...] = cp.asarray(new)
        key[...] = cp.asarray(rng.standard_normal(key.shape).astype(np.float16))
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        right = write_oracle(key.get(), before, np.array(new))
        assert caches[0].get().tobytes() == caches[1].get().tobytes() == right.tobytes()


def test_scratch_memory_is_refused_and_pinned_by_a_capture(cp, device):
    stream = cp.cuda.Stream(non_blocking=True)
    blocks = []

    def reserve(nbytes):
        with scratch_of(device, stream.ptr) as scratch:
            blocks.append(scratch.reserve(nbytes))

    with pytest.raises(CaptureError, match=r"workspace .*cupyflash\.warmup"):
        captured(cp, stream, lambda: reserve(1000))
    reserve(1000)
    captured(cp, stream, lambda: reserve(1000))
    assert blocks[0] is blocks[1]
    reserve(64 << 20)
    with scratch_of(device, stream.ptr) as scratch:
        assert scratch.nbytes == blocks[0].nbytes + (64 << 20)
    cupyflash.free_workspaces()


@pytest.mark.parametrize("how", ["object", "handle", "current"])
def test_a_call_runs_on_the_stream_it_is_given(cp, how):
    stream = cp.cuda.Stream(non_blocking=True)
    pair, (out, lse) = states(cp), results(cp)
    cp.cuda.Device().synchronize()

    def call():
        given = {"object": stream, "handle": stream.ptr, "current": None}[how]
        merge_attn_states(out, *pair[0], *pair[1], lse, stream=given)

    call()
    cp.cuda.Device().synchronize()
    out[...], lse[...] = np.nan, np.nan
    cp.cuda.Device().synchronize()
    stream.begin_capture()  # what is queued there is recorded, not run
    try:
        if how == "current":
            with stream:
                call()
        else:
            call()
    finally:
        graph = stream.end_capture()
    cp.cuda.Device().synchronize()
    assert cp.isnan(lse).all()
    graph.launch(stream)
    stream.synchronize()
    check(pair, out, lse)


def test_blocks_more_than_4_gib_apart(cp):
    far = 5 << 30
    try:
        pool = cp.empty(2 * far + (1 << 20), np.uint8)
    except cp.cuda.memory.OutOfMemoryError:
        pytest.skip("not enough GPU memory")
    rng = np.random.default_rng(4)
    key = cp.asarray(rng.standard_normal((6, 2, 64)).astype(np.float16))
    near = cp.zeros((3, 2, 2, 64), np.uint8)
    cache = cp.lib.stride_tricks.as_strided(pool, near.shape, (far, 128, 64, 1))
    cache[...] = 0
    reshape_and_cache_flash(key, key, cache, near, cp.asarray([5, 0, 3, 4]), "fp8", 1.0, 1.0)
    np.testing.assert_array_equal(cache.get(), near.get())
    assert near.get().any((1, 2, 3)).all()


def test_the_driver_encodes_tensor_maps(cp, device):
    array = cp.zeros((64, 128), np.float16)
    bf16, swizzle_128, none, zeros = 9, 3, 0, 0
    where = device.pointer(array)

    def encode(pointer, box=(64, 64)):
        return device.encode_tensor_map(
            array, bf16, pointer, (128, 64), (256,), box, swizzle_128, none, zeros
        )

    made = encode(where)
    assert len(made) == 128
    assert made != bytes(128)
    assert encode(where) is made
    with pytest.raises(ValueError, match=r"refuses a tensor map.*box=\(128, 64\)"):
        encode(where, (128, 64))
    with pytest.raises(ValueError, match="multiples of 16"):
        encode(where + 2)


def test_large_arrays_and_head_counts(cp):
    rng = np.random.default_rng(5)
    shape = (3000, 40, 128)
    pair = [
        (
            cp.asarray(rng.standard_normal(shape).astype(np.float16)),
            cp.asarray(rng.uniform(-5, 5, shape[1::-1]).astype(np.float32)),
        )
        for _ in range(2)
    ]
    out, lse = cp.empty(shape, np.float16), cp.empty(shape[1::-1], np.float32)
    merge_attn_states(out, *pair[0], *pair[1], lse)
    check(pair, out, lse)
