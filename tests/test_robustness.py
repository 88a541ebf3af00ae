"""What long-running and crowded programs meet: full disks, empty calls, threads, huge grids."""

from __future__ import annotations

import errno
import gc
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, expected, random_batch, run

import cupyflash as cf
from cupyflash.runtime import cubin_cache as caching
from cupyflash.runtime.compile import compiled_file
from cupyflash.runtime.dtypes import BF16 as BF16_TYPE
from cupyflash.runtime.merge_plan import merge_variant
from cupyflash.testing import expect_merge, write_oracle

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("where", ["lock", "file", "rename"])
def test_a_cache_on_a_full_disk_is_left_for_a_private_one(tmp_path, monkeypatch, where):
    pytest.importorskip("cupy")
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))

    def full(function, name):
        real = getattr(function, name)

        def failing(*args, **kwargs):
            if str(folder) in f"{args} {kwargs}" and ".json" not in f"{args}":
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(function, name, failing)

    at = {"lock": (caching.os, "open"), "file": (caching.tempfile, "mkstemp")}
    full(*at.get(where, (caching.os, "replace")))
    monkeypatch.setattr(caching, "_private", {})
    variant = merge_variant("sm_80", BF16_TYPE, BF16_TYPE)
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(.*No space left"):
        path = compiled_file(variant)
    assert not path.is_relative_to(folder)
    assert path.read_bytes().startswith(b"\x7fELF")
    assert compiled_file(variant) == path  # and neither compiled nor warned about again
    assert not list(folder.glob("*.tmp"))
    caching.shutil.rmtree(path.parent)


SIZES = {
    "no request": ([], []),
    "requests of nothing": ([0, 0], [0, 0]),
    "no queries": ([0, 0], [5, 20]),
    "no keys": ([3, 1], [0, 0]),
    "some of each": ([0, 2, 0, 1], [7, 0, 0, 33]),
}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_splits", [0, 4])
def test_attention_of_nothing(path, sizes, page_size, num_splits):
    q_lens, kv_lens = SIZES[sizes]
    batch = random_batch(q_lens, kv_lens, 4, 2, dtype=BF16)
    options = {"s_aux": np.zeros(4, np.float32), "num_splits": num_splits, "causal": True}
    args = arguments(path, *batch, q_lens, kv_lens, page_size, **options)
    out, lse = run(path, args)
    expected(path, args).check(out.astype(BF16), lse.astype(np.float32))
    found = cf.flash_attn_varlen_func(**args, return_softmax_lse=True)
    assert [a.shape for a in found] == [out.shape, lse.shape]
    assert cf.explain(**args).problem.batch == len(q_lens)


@pytest.mark.parametrize(("batch", "len_q", "len_k"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_batches_of_nothing(path, batch, len_q, len_k):
    zeros = lambda *shape: path.array(np.zeros(shape), BF16)  # noqa: E731
    q, k, v = zeros(batch, len_q, 4, 64), zeros(batch, len_k, 2, 64), zeros(batch, len_k, 2, 32)
    cache, used = (zeros(batch, 16, 2, 64), zeros(batch, 16, 2, 32)), np.zeros(batch, np.int32)
    for out, lse in (
        cf.flash_attn_func(q, k, v, return_softmax_lse=True),
        cf.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=path.array(used), return_softmax_lse=True
        ),
    ):
        assert (out.shape, lse.shape) == ((batch, len_q, 4, 32), (batch, 4, len_q))
        assert not path.host(out).astype(np.float32).any()


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64)])
def test_merges_of_nothing(merge_path, shape):
    states = [merge_path.array(np.zeros(shape, np.float16)) for _ in range(3)]
    lses = [merge_path.array(np.zeros(shape[1::-1], np.float32)) for _ in range(3)]
    cf.merge_attn_states(states[0], states[1], lses[1], states[2], lses[2], lses[0])


def test_writes_of_nothing(write_path):
    cache = [write_path.array(np.ones((2, 16, 2, 64), np.float16)) for _ in "kv"]
    key = write_path.array(np.zeros((3, 2, 64), np.float16))
    for tokens, slots in ((key[:0], []), (key, []), (key, [-1, -1, -1])):
        slot_mapping = write_path.array(np.array(slots, np.int64))
        cf.reshape_and_cache_flash(tokens, tokens, *cache, slot_mapping, "auto", 1.0, 1.0)
    empty = [write_path.array(np.zeros((0, 16, 2, 64), np.float16)) for _ in "kv"]
    skipped = write_path.array(np.array([-1, -1, -1]))
    cf.reshape_and_cache_flash(key, key, *empty, skipped, "auto", 1.0, 1.0)
    assert all((write_path.host(c) == 1).all() for c in cache)


def test_schedules_of_nothing(path):
    lengths = path.array(np.zeros(0, np.int32))
    cf.get_scheduler_metadata(0, 0, 0, 4, 2, 64, lengths, "float16")


@pytest.mark.parametrize(("tokens", "heads"), [(70_000, 1), (1, 70_000)])
def test_merges_of_more_rows_than_a_grid_has(large_path, tokens, heads):
    rng = np.random.default_rng(0)
    states = [
        (
            rng.standard_normal((tokens, heads, 8)).astype(np.float16),
            rng.standard_normal((heads, tokens)).astype(np.float32),
        )
        for _ in range(2)
    ]
    out = large_path.array(np.full((tokens, heads, 8), np.nan, np.float16))
    lse = large_path.array(np.full((heads, tokens), np.nan, np.float32))
    arrays = [large_path.array(a) for state in states for a in state]
    cf.merge_attn_states(out, *arrays, lse)
    expect_merge(*states, out_dtype="fp16").check(large_path.host(out), large_path.host(lse))


@pytest.mark.parametrize(("tokens", "heads"), [(140_000, 1), (1, 70_000)])
def test_writes_of_more_rows_than_a_grid_has(large_path, tokens, heads):
    rng = np.random.default_rng(0)
    key = rng.standard_normal((tokens, heads, 8)).astype(np.float16)
    before = np.zeros((-(-tokens // 16), 16, heads, 8), np.float16)
    slots = rng.permutation(len(before) * 16)[:tokens]
    caches = [large_path.array(before) for _ in "kv"]
    source = large_path.array(key)
    cf.reshape_and_cache_flash(source, source, *caches, large_path.array(slots), "auto", 1.0, 1.0)
    right = before.copy()
    right.reshape(-1, heads, 8)[slots] = key
    if tokens == 1:
        np.testing.assert_array_equal(write_oracle(key, before, slots), right)
    for cache in caches:
        assert large_path.host(cache).tobytes() == right.tobytes()


def test_threads_share_one_program(path):
    """Calls of other shapes and splits from four threads; each has its own results."""
    shapes = [([1], [300]), ([5, 2], [64, 9]), ([1, 1, 1], [40, 500, 3]), ([30], [30])]
    repeats = 2 if path.name.startswith("emulator") else 10
    ready = threading.Barrier(len(shapes))

    def calls(number, q_lens, kv_lens):
        batch = random_batch(q_lens, kv_lens, 4, 2, dtype=BF16, seed=number)
        args = arguments(path, *batch, q_lens, kv_lens, 16, num_splits=4)
        ready.wait()
        found = [run(path, args) for _ in range(repeats)]
        return expected(path, args), found

    with ThreadPoolExecutor(len(shapes)) as pool:
        futures = [
            pool.submit(copy_context().run, calls, n, *shape) for n, shape in enumerate(shapes)
        ]
        for future in futures:
            right, found = future.result()
            for out, lse in found:
                right.check(out.astype(BF16), lse.astype(np.float32))
                assert out.tobytes() == found[0][0].tobytes()


@pytest.mark.gpu
def test_two_streams_at_once_have_scratch_memory_of_their_own():
    import cupy as cp
    from conftest import Path

    path, streams = Path("gpu"), [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    calls = []
    for number in range(2):
        batch = random_batch([1] * 4, [3000 + number] * 4, 8, 2, dtype=BF16, seed=number)
        args = arguments(path, *batch, [1] * 4, [3000 + number] * 4, 16, num_splits=16)
        outs = [cp.full_like(args["q"], np.nan) for _ in range(50)]
        calls.append((args, outs, run(path, args)[0]))
    cp.cuda.Device().synchronize()
    for turn in range(50):
        for stream, (args, outs, _) in zip(streams, calls, strict=True):
            cf.flash_attn_varlen_func(**args, out=outs[turn], stream=stream)
    cp.cuda.Device().synchronize()
    for _, outs, right in calls:
        for out in outs:
            np.testing.assert_array_equal(out.get().astype(float), right)


def kept():
    """Bytes of Python objects; those that only Python's own free lists hold left out."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def shapes_of_a_long_run(path):
    """Twenty calls of other shapes: decode, prompts, mixtures; packed, paged; split or not."""
    found = []
    for number in range(20):
        q_lens = ([1] * (1 + number % 7), [30 + number, 1], [5, 64, 1], [1])[number % 4]
        kv_lens = [q + 17 * (number + 1) for q in q_lens]
        dim, heads = (64, 128)[number % 2], 2 * (1 + number % 3)
        batch = random_batch(q_lens, kv_lens, heads, 2, dim, np.float16, number)
        page_size, splits = (None, 16, 48)[number % 3], (0, 1, 3)[number // 3 % 3]
        found.append(arguments(path, *batch, q_lens, kv_lens, page_size, num_splits=splits))
    return found


@pytest.mark.gpu
def test_two_thousand_calls_of_twenty_shapes_leave_memory_flat():
    """Of the GPU, of CuPy's pool, and of the process; new outputs every time."""
    import cupy as cp
    from conftest import Path

    calls, pool = shapes_of_a_long_run(Path("gpu")), cp.get_default_memory_pool()

    def rounds(count):
        for _ in range(count):
            for args in calls:
                cf.flash_attn_varlen_func(**args, return_softmax_lse=True)
        cp.cuda.Device().synchronize()
        # What is free on the GPU says nothing where other processes of the tests use it.
        free = None if "PYTEST_XDIST_WORKER" in os.environ else cp.cuda.runtime.memGetInfo()[0]
        return pool.used_bytes(), pool.total_bytes(), free

    first = rounds(5)
    tracemalloc.start()
    try:
        rounds(20)
        before = kept()
        last = rounds(75)
        grown = kept() - before
    finally:
        tracemalloc.stop()
    assert last == first
    assert grown < 64 << 10


def test_many_calls_of_twenty_shapes_leave_the_process_flat():
    """Without a GPU: what the library keeps of calls on NumPy arrays."""
    from conftest import Path

    calls = shapes_of_a_long_run(Path("numpy"))

    def rounds(count):
        for _ in range(count):
            for args in calls:
                cf.flash_attn_varlen_func(**args, return_softmax_lse=True)

    rounds(1)
    tracemalloc.start()
    try:
        rounds(1)
        before = kept()
        rounds(4)
        grown = kept() - before
    finally:
        tracemalloc.stop()
    assert grown < 64 << 10
