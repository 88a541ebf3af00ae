"""Public reports on graphs and streams; docs/public_reports.md names them."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, check_results, random_batch, results, run
from graphs import capture

from cupyflash import flash_attn_varlen_func, reshape_and_cache_flash

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_b73_padded_slots_when_a_graph_is_replayed(path):
    """Captured with 8 requests, replayed with 5 and three that have no keys and slot -1."""
    kv_lens = [30, 17, 64, 5, 40, 16, 33, 1]
    args = arguments(path, *random_batch([1] * 8, kv_lens, 4, 2, dtype=BF16), [1] * 8, kv_lens, 16)
    rng = np.random.default_rng(3)
    table, used = path.host(args["block_table"]).copy(), np.array(kv_lens, np.int32)
    new = [path.array(rng.standard_normal((8, 2, 64)).astype(BF16)) for _ in "kv"]
    slots = path.array(table[np.arange(8), (used - 1) // 16] * np.int64(16) + (used - 1) % 16)
    written = results(path, args)

    def step():
        reshape_and_cache_flash(*new, args["k"], args["v"], slots, "auto", 1.0, 1.0)
        flash_attn_varlen_func(**args, **written)

    graph = capture(path, step)
    used[5:], table[5:] = 0, 0
    padded = path.host(slots).copy()
    padded[5:] = -1
    for array, values in ((args["seqused_k"], used), (args["block_table"], table), (slots, padded)):
        array[...] = path.array(values)
    before = path.host(args["k"]).copy()
    for array in new:
        array[5:] = np.nan
    graph.replay()
    check_results(path, args, written)
    assert path.host(args["k"]).tobytes() == before.tobytes()
    out, lse = run(path, args)
    np.testing.assert_array_equal(path.host(written["out"]).astype(float), out)
    np.testing.assert_array_equal(path.host(written["lse"]), lse)


def test_b74_a_graph_replayed_with_longer_keys(path):
    """Captured at 64 keys, replayed at the bound."""
    longest = 512 if path.name.startswith("emulator") else 8192
    batch = random_batch([1, 1], [longest, longest], 2, 1, dtype=BF16)
    args = arguments(path, *batch, [1, 1], [longest, longest], 64)
    args["seqused_k"][...] = 64
    written = results(path, args)
    graph = capture(path, lambda: flash_attn_varlen_func(**args, **written))
    check_results(path, args, written)
    args["seqused_k"][...] = path.array([longest, longest - 3], np.int32)
    graph.replay()
    check_results(path, args, written)
    assert (graph.kernels > 0) == (path.name != "numpy")


def test_b77_what_is_allocated_after_a_capture_stays_intact(path):
    """A graph keeps to arrays that it was given and to scratch memory that nobody else gets."""
    kv_lens = [300, 411]
    batch = random_batch([1, 1], kv_lens, 2, 1, dtype=BF16)
    args = arguments(path, *batch, [1, 1], kv_lens, 16, num_splits=4)
    written = results(path, args)
    graph = capture(path, lambda: flash_attn_varlen_func(**args, **written))
    sizes = [1 << n for n in range(8, 21)]
    others = [path.xp.full(size, n, np.uint8) for n in range(77) for size in sizes]
    wide = arguments(path, *random_batch([9], [700], 4, 1, dtype=BF16), [9], [700], num_splits=8)
    right = run(path, wide)  # takes more scratch memory than the captured call
    for _ in range(2):
        for array in written.values():
            array[...] = np.nan
        graph.replay()
        check_results(path, args, written)
    for number, array in enumerate(others):
        assert bool((array == number // len(sizes)).all())
    np.testing.assert_array_equal(run(path, wide)[0], right[0])


@pytest.mark.parametrize("how", ["object", "handle", "standard"])
def test_b79_every_launch_goes_to_the_stream_that_is_given(emulated_path, how):
    """None on the legacy stream, of a call that splits its keys and of a cache write."""
    path, device = emulated_path
    args = arguments(path, *random_batch([20], [300], 2, 1), [20], [300], 16, num_splits=4)
    stream = {
        "object": SimpleNamespace(ptr=77),
        "handle": 77,
        "standard": SimpleNamespace(__cuda_stream__=lambda: (0, 77)),
    }[how]
    seen = []
    launch = device.launch
    device.launch = lambda kernel, plan, packed, queue: (
        seen.append(queue) or launch(kernel, plan, packed, queue)
    )
    flash_attn_varlen_func(**args, stream=stream)
    key = path.array(np.ones((1, 1, 64), np.float16))
    slots = path.array(np.array([3]))
    reshape_and_cache_flash(key, key, args["k"], args["v"], slots, "auto", 1.0, 1.0, stream=stream)
    assert seen == [77, 77, 77]


@pytest.fixture
def emulated_path():
    from conftest import Path

    path = Path("emulator-sm_80")
    with path.active() as device:
        yield path, device


@pytest.mark.gpu
@pytest.mark.parametrize("given", [True, False])
def test_b79_a_call_waits_for_what_its_stream_does(given):
    import cupy as cp
    from conftest import Path

    path = Path("gpu")
    batch = random_batch([1], [3000], 4, 2)
    args = arguments(path, *batch, [1], [3000], 16, num_splits=8, fa_version=2)
    right, written, ready = run(path, args), results(path, args), args["q"].copy()
    spin = cp.RawKernel(
        'extern "C" __global__ void spin() { long long t = clock64(); while (clock64() - t < '
        "50000000) {} }",
        "spin",
    )
    stream = cp.cuda.Stream(non_blocking=True)
    late = {**args, "q": cp.full_like(ready, np.nan)}
    option = {"stream": stream} if given else {}
    cp.cuda.Device().synchronize()
    with stream:
        spin((1,), (1,), ())
        late["q"][...] = ready
        if not given:
            flash_attn_varlen_func(**late, **written)
    if given:
        flash_attn_varlen_func(**late, **written, **option)
    stream.synchronize()
    np.testing.assert_array_equal(written["out"].get().astype(float), right[0])


@pytest.mark.parametrize(("q_len", "launches"), [(1, 1), (20, 2)])
def test_b79_a_captured_call_holds_every_launch(path, q_len, launches):
    """Pieces of keys are merged by the last of them to be done, or by a launch of its own."""
    numpy = path.name == "numpy"
    options = {"num_splits": 8, "fa_version": None if numpy else 2}
    args = arguments(path, *random_batch([q_len], [300], 4, 2), [q_len], [300], 16, **options)
    written = results(path, args)
    graph = capture(path, lambda: flash_attn_varlen_func(**args, **written))
    assert graph.kernels == (0 if numpy else launches)
