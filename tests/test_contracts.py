"""One test, or a few, for each row of docs/contracts.md, on every path."""

from __future__ import annotations

import math
import threading

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, attend, check, mean_batch, random_batch, rounding, run
from hypothesis import given

import cupyflash.testing as cft
from cupyflash import flash_attn_varlen_func
from cupyflash.testing import Case
from cupyflash.testing.strategies import cases

BF16 = np.dtype(ml_dtypes.bfloat16)
CASE = Case(
    lengths=((1, 37), (5, 20), (0, 9), (3, -1), (1, -1)), num_heads_kv=2, group_size=3,
    page_size=16, causal=True, q_type="bf16", kv_type="bf16",
)  # fmt: skip


@given(case=cases(q_type="bf16", kv_type="bf16"))
def test_any_ragged_batch_of_16_bits(path, case):
    case.make(path.xp).check(flash_attn_varlen_func)


@given(case=cases())
def test_any_ragged_batch_of_any_type(path, case):
    if path.name != "numpy" and case.q_type == "fp32":
        case = case.replace(q_type="fp16", kv_type="fp16")
    case.make(path.xp).check(flash_attn_varlen_func)


# LSE


def test_lse_is_natural_and_indexed_head_then_token(path):
    q, k, v = mean_batch([2, 3], [4, 6], heads=4, kv_heads=2)
    _, lse = attend(path, q, k, v, [2, 3], [4, 6])
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([4, 4, 6, 6, 6]), (4, 5)), rtol=1e-6)


def test_lse_includes_the_sink(path):
    q, k, v = mean_batch([1], [4], heads=2)
    sinks = np.array([0.0, 1.0], np.float32)
    _, lse = attend(path, q, k, v, [1], [4], s_aux=sinks)
    np.testing.assert_allclose(lse[:, 0], np.log([5, 4 + math.e]), rtol=1e-6)


@pytest.mark.parametrize("which", ["none", "out", "lse", "both"])
def test_outputs_may_be_given_or_made(path, which):
    args = arguments(path, *random_batch([3], [5]), [3], [5])
    right = run(path, args)
    if which in ("out", "both"):
        args["out"] = path.array(np.full((3, 1, 64), np.nan, args["q"].dtype))
    if which in ("lse", "both"):
        args["lse"] = path.array(np.full((1, 3), np.nan, np.float32))
    out, lse = flash_attn_varlen_func(**args, return_softmax_lse=True)
    assert "out" not in args or out is args["out"]
    assert "lse" not in args or lse is args["lse"]
    np.testing.assert_array_equal(path.host(out), right[0])
    np.testing.assert_array_equal(path.host(lse), right[1])
    assert path.host(flash_attn_varlen_func(**args)).tobytes() == path.host(out).tobytes()


# Rows that see no key


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("sink", [False, True])
def test_empty_rows_are_zero_and_minus_infinity_or_the_sink(path, sink, page_size):
    q, k, v = random_batch([3, 5, 1], [0, 3, 0], heads=4, kv_heads=2)
    sinks = np.array([0.5, -2, 3, 0], np.float32)
    options = {"s_aux": sinks} if sink else {}
    out, lse = attend(path, q, k, v, [3, 5, 1], [0, 3, 0], page_size, causal=True, **options)
    empty = [0, 1, 2, 3, 4, 8]
    assert (out[empty] == 0).all()
    right = np.broadcast_to(sinks[:, None] if sink else -np.inf, (4, len(empty)))
    np.testing.assert_array_equal(lse[:, empty], right)
    assert np.isfinite(out).all()


def test_rows_outside_of_a_window_are_empty(path):
    q, k, v = mean_batch([6], [2])
    out, lse = attend(path, q, k, v, [6], [2], window_size=(0, 0))
    assert out[:, 0, 0].tolist() == [0, 0, 0, 0, 0, 1]
    assert np.isneginf(lse[0]).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [3, 0])])
def test_a_batch_without_queries_is_a_no_op(path, lengths):
    q_lens, kv_lens = lengths
    k = np.ones((sum(kv_lens), 1, 64), np.float32)
    args = arguments(path, np.ones((2, 1, 64), np.float32), k, k, q_lens, kv_lens)
    out, lse = run(path, args)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


# Sink


@pytest.mark.parametrize("kind", [np.float32, np.float16, BF16])
def test_sink_is_a_raw_logit(path, kind):
    """Neither scaled nor capped: one key with a scaled, capped score of tanh(2)."""
    q = np.full((1, 1, 64), 1, np.float32)
    k, v = np.full((1, 1, 64), 1 / 32, np.float32), np.ones((1, 1, 64), np.float32)
    sinks = np.array([3.0], kind)
    out, lse = attend(path, q, k, v, [1], [1], softmax_scale=1.0, softcap=1.0, s_aux=sinks)
    total = math.exp(math.tanh(2)) + math.exp(3)
    np.testing.assert_allclose(out, math.exp(math.tanh(2)) / total, rtol=rounding(path))
    np.testing.assert_allclose(lse, math.log(total), rtol=1e-6)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 8])
def test_sink_counts_once_for_any_split(path, num_splits):
    case = CASE.replace(sink=True, lengths=((1, 500), (1, 0), (2, -2)))
    case.make(path.xp).check(flash_attn_varlen_func, num_splits=num_splits)


def test_a_sink_of_minus_infinity_is_no_sink(path):
    batch = (*random_batch([2], [7]), [2], [7])
    without = attend(path, *batch)
    off = attend(path, *batch, s_aux=np.array([-np.inf], np.float32))
    for left, right in zip(off, without, strict=True):
        np.testing.assert_array_equal(left, right)


# Masks


@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 4), (2, 6), (6, 2), (1, 9), (1, 1)])
def test_causal_is_aligned_at_the_bottom_right(path, q_len, kv_len):
    q, k, v = mean_batch([q_len], [kv_len])
    out, lse = attend(path, q, k, v, [q_len], [kv_len], causal=True)
    seen = np.arange(q_len) + kv_len - q_len + 1
    np.testing.assert_allclose(out[:, 0, 0], np.maximum(seen - 1, 0) / 2, rtol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0], np.log(np.maximum(seen, 0)), rtol=1e-6)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (3, 0), (-1, 2), (2, 3), (500, 0)])
def test_window_is_inclusive_and_minus_one_is_open(path, window):
    q, k, v = mean_batch([10], [10])
    left, right = (10 if side < 0 else side for side in window)
    out, lse = attend(path, q, k, v, [10], [10], window_size=window)
    for row in range(10):
        seen = np.arange(max(0, row - left), min(9, row + right) + 1)
        assert out[row, 0, 0] == pytest.approx(seen.mean(), rel=1e-6)
        assert lse[0, row] == pytest.approx(math.log(len(seen)), rel=1e-6, abs=1e-6)


def test_window_of_minus_one_and_zero_is_causal(path):
    batch = (*random_batch([5], [9]), [5], [9])
    causal = attend(path, *batch, causal=True)
    for options in ({"window_size": (-1, 0)}, {"window_size": (-1, -1), "causal": True}):
        for left, right in zip(attend(path, *batch, **options), causal, strict=True):
            np.testing.assert_array_equal(left, right)


# Score order, ALiBi


def test_order_is_scale_softcap_alibi_mask(path):
    q = np.full((1, 1, 64), 1, np.float32)
    k = np.full((3, 1, 64), 1 / 32, np.float32)
    v = np.arange(3, dtype=np.float32).repeat(64).reshape(k.shape)
    out, _ = attend(
        path, q, k, v, [1], [3], softmax_scale=1.0, softcap=1.0, causal=True,
        alibi_slopes=np.ones(1, np.float32),
    )  # fmt: skip
    np.testing.assert_allclose(out, 1.57521, rtol=1e-5)


@pytest.mark.parametrize("alibi", ["head", "request"])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_counts_from_the_last_key_and_is_in_the_lse(path, alibi, causal):
    case = CASE.replace(alibi=alibi, causal=causal)
    case.make(path.xp).check(flash_attn_varlen_func)


# What must not be read, what must not be written


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("page_size", [4, 16])
def test_unused_slots_may_hold_anything(path, poison, page_size):
    kv_lens = [13, 1, 16, 0]
    batch = random_batch([1, 1, 4, 2], kv_lens, heads=4, kv_heads=2)
    args = arguments(path, *batch, [1, 1, 4, 2], kv_lens, page_size, causal=True)
    results = []
    for fill in (0.0, poison):
        filled = dict(args)
        for name in "kv":
            cache = path.host(args[name]).copy()
            cache[np.isnan(cache)] = fill
            filled[name] = path.array(cache)
        results.append(run(path, filled))
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left, right)
    assert np.isfinite(results[1][0]).all()


def test_pages_before_a_window_may_be_gone(path):
    """Engines give pages that a window has left to others, and point at the null block."""
    batch = random_batch([2], [100])
    args = arguments(path, *batch, [2], [100], 4, causal=True, window_size=(7, 0))
    right = run(path, args)
    table = path.host(args["block_table"]).copy()
    null = table[0, 0]
    gone = (98 - 7) // 4
    table[0, :gone] = null
    args["block_table"] = path.array(table)
    for name in "kv":
        cache = path.host(args[name]).copy()
        cache[null] = np.nan
        args[name] = path.array(cache)
    for left, expected in zip(run(path, args), right, strict=True):
        np.testing.assert_array_equal(left, expected)


def test_rows_past_the_last_request_are_left_as_they_are(path):
    q, k, v = random_batch([7], [7])
    args = arguments(path, q, k, v, [2, 3], [3, 4])
    out, lse = run(path, args)
    assert np.isnan(out[5:]).all()
    assert np.isnan(lse[:, 5:]).all()
    assert np.isfinite(out[:5]).all()


@pytest.mark.parametrize("layout", cft.LAYOUTS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_strides_are_read_from_the_arrays(path, layout, page_size):
    CASE.replace(layout=layout, page_size=page_size).make(path.xp).check(flash_attn_varlen_func)


# Determinism, softmax_scale, bounds, threads


@pytest.mark.parametrize("page_size", [None, 16])
def test_same_inputs_same_bits(path, page_size):
    inputs = CASE.replace(page_size=page_size, lengths=((1, 300), (70, 30), (1, 20))).make(path.xp)
    first = inputs.call(flash_attn_varlen_func)
    for _ in range(3):
        for left, right in zip(inputs.call(flash_attn_varlen_func), first, strict=True):
            assert left.tobytes() == right.tobytes()


def test_softmax_scale_of_any_host_number(path):
    args = arguments(path, *random_batch([2], [9]), [2], [9])
    results = [
        run(path, {**args, "softmax_scale": scale})
        for scale in (2.0, 2, np.float64(2), np.float32(2), np.array(2.0))
    ]
    for result in results:
        np.testing.assert_array_equal(result[0], results[0][0])
    default = run(path, args)
    np.testing.assert_array_equal(default[0], run(path, {**args, "softmax_scale": 64**-0.5})[0])


def test_max_seqlen_is_only_a_bound(path):
    args = arguments(path, *random_batch([3, 1], [20, 9]), [3, 1], [20, 9], 16)
    right = check(path, args)
    wide = run(path, {**args, "max_seqlen_q": 1000, "max_seqlen_k": 2**20})
    for left, expected in zip(wide, right, strict=True):
        np.testing.assert_array_equal(left, expected)


def test_calls_from_several_threads(path):
    inputs = [CASE.replace(seed=seed).make(path.xp) for seed in range(4)]
    right = [each.call(flash_attn_varlen_func) for each in inputs]
    found = {}

    def work(index):
        with path.active():
            calls = (inputs[index].call(flash_attn_varlen_func) for _ in range(6))
            found[index] = [out.tobytes() for out, _ in calls]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        assert set(found[index]) == {right[index][0].tobytes()}
