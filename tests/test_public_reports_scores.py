"""Public reports on windows, soft cap, ALiBi and sinks; docs/public_reports.md names them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, attend, check, mean_batch, random_batch, rounding, run, starts
from graphs import capture

from cupyflash import (
    cascade_attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from cupyflash.testing import Case

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("page_size", [None, 4])
def test_b47_window_is_not_off_by_one(path, page_size):
    batch = (*mean_batch([10], [10], dtype=BF16), [10], [10], page_size)
    out, lse = attend(path, *batch, causal=True, window_size=(3, 0))
    assert out[:, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    np.testing.assert_allclose(lse[0], np.log([1, 2, 3, 4, 4, 4, 4, 4, 4, 4]), atol=1e-6)


def test_b47_window_of_one_key(path):
    q, k, v = random_batch([10], [10], dtype=BF16)
    out, lse = attend(path, q, k, v, [10], [10], window_size=(0, 0))
    np.testing.assert_array_equal(out, v.astype(float))
    score = np.einsum("ihd,ihd->hi", q.astype(float), k.astype(float)) / 8
    np.testing.assert_allclose(lse, score, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0)])
def test_b49_other_negative_windows_are_refused(path, window):
    args = arguments(path, *mean_batch([4], [4]), [4], [4], window_size=window)
    with pytest.raises(ValueError, match="window_size"):
        flash_attn_varlen_func(**args)


def test_b49_an_open_window_leaves_causal_on(path):
    args = arguments(path, *random_batch([4], [9]), [4], [9], causal=True)
    right = check(path, args)
    found = run(path, {**args, "window_size": (-1, -1)})
    np.testing.assert_array_equal(found[0], right[0])


def test_b50_a_window_longer_than_the_context_leaves_causal_on(path):
    batch = (*mean_batch([7], [7], dtype=BF16), [7], [7])
    out, _ = attend(path, *batch, causal=True, window_size=(4096, 0))
    assert out[:, 0, 0].tolist() == [i / 2 for i in range(7)]


def ones_in_a_window(path, kv_len, window, num_splits):
    q, k, _ = mean_batch([1], [kv_len], dtype=np.float16)
    v = np.full(k.shape, 1e4, np.float16)
    v[-window - 1 :] = 1
    options = {"causal": True, "window_size": (window, 0), "num_splits": num_splits}
    out, lse = run(path, arguments(path, q, k, v, [1], [kv_len], 16, **options))
    assert (out == 1).all()
    np.testing.assert_allclose(lse, math.log(window + 1), atol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 8])
def test_b52_a_window_in_a_long_context_leaves_splits_empty(large_path, num_splits):
    ones_in_a_window(large_path, 20000, 256, num_splits)


@pytest.mark.parametrize("num_splits", [1, 8])
def test_b52_a_window_in_a_context_leaves_splits_empty(path, num_splits):
    ones_in_a_window(path, 900, 40, num_splits)


@pytest.mark.parametrize("kv_len", [1020, 1023, 1024, 1031, 1100])
def test_b53_several_tokens_over_fp8_keys_in_a_window(path, kv_len):
    case = Case(
        lengths=((8, kv_len - 8),), num_heads_kv=2, group_size=2, head_dim=256, page_size=16,
        causal=True, window_size=(1022, 0), q_type="bf16", kv_type="e4m3", layout="HND",
        descale=True,
    )  # fmt: skip
    case.make(path.xp).check(flash_attn_varlen_func)


def capped(path):
    """Two keys with scaled logits 2 and 0 and values 1 and 0: q, k, v [n, 1, 64]."""
    q = np.zeros((1, 1, 64), np.float32)
    k, v = np.zeros((2, 1, 64), np.float32), np.zeros((2, 1, 64), np.float32)
    q[..., 0], k[0, 0, 0], v[0] = 4, 4, 1
    kind = np.float32 if path.name == "numpy" else np.float16
    return [path.array(array.astype(kind)) for array in (q, k, v)]


def shares(*scores):
    """The softmax of a row, and its LSE."""
    lse = math.log(sum(map(math.exp, scores)))
    return [math.exp(score - lse) for score in scores], lse


(RIGHT, _), RIGHT_LSE = shares(math.tanh(2), 0)


def test_b55_softcap_in_a_ragged_batch(path):
    q, k, v = capped(path)
    args = (1, path.array(starts([1])), 2, path.array(starts([2])))
    out, lse = flash_attn_varlen_func(q, k, v, *args, softcap=1.0, return_softmax_lse=True)
    np.testing.assert_allclose(path.host(out), RIGHT, rtol=rounding(path))
    np.testing.assert_allclose(path.host(lse), RIGHT_LSE, atol=1e-6)
    for softcap, score in ((2.0, 2 * math.tanh(1)), (0.0, 2.0), (1.0, math.tanh(2))):
        out = flash_attn_varlen_func(q, k, v, *args, softcap=softcap)
        np.testing.assert_allclose(path.host(out), shares(score, 0)[0][0], rtol=rounding(path))


def test_b55_softcap_in_equal_lengths_and_with_a_cache(path):
    q, k, v = (array[None] for array in capped(path))
    out = flash_attn_func(q, k, v, softcap=1.0)
    np.testing.assert_allclose(path.host(out), RIGHT, rtol=rounding(path))
    lengths = path.array([2], np.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, softcap=1.0)
    np.testing.assert_allclose(path.host(out), RIGHT, rtol=rounding(path))


def test_b55_softcap_in_cascade(path):
    q, k, v = capped(path)
    out = path.array(np.full((1, 1, 64), np.nan, q.dtype))
    one, table = path.array([1], np.int32), path.array([[0, 1]], np.int32)
    cascade_attention(
        out, q, k[:, None], v[:, None], path.array(starts([1])), 1, path.array(starts([1])), one,
        one, 2, 0.125, None, (-1, -1), 1.0, table, 1, 0, None,
    )  # fmt: skip
    np.testing.assert_allclose(path.host(out), RIGHT, rtol=rounding(path))


def test_b55_softcap_when_a_graph_is_replayed(path):
    q, k, v = capped(path)
    out, lengths = path.array(np.full(q.shape, np.nan, q.dtype)), [starts([1]), starts([2])]
    args = (1, path.array(lengths[0]), 2, path.array(lengths[1]))
    graph = capture(path, lambda: flash_attn_varlen_func(q, k, v, *args, softcap=1.0, out=out))
    out[...] = np.nan
    graph.replay()
    np.testing.assert_allclose(path.host(out), RIGHT, rtol=rounding(path))


def test_b56_softcap_comes_before_alibi(path):
    q = np.full((1, 1, 64), 1, np.float32)
    k = np.full((3, 1, 64), 1 / 4, np.float32)  # q·k = 16, times 1/8 = 2
    v = np.arange(3, dtype=np.float32).repeat(64).reshape(k.shape)
    slopes = np.ones(1, np.float32)
    out, _ = attend(path, q, k, v, [1], [3], softcap=1.0, alibi_slopes=slopes)
    weights, _ = shares(-2, -1, 0)  # the caps are equal; the bias is minus the distance
    # In units of 2**-11: storing costs half an ulp, 1 / 1.575; rounding the weights to float16
    # before the product, e**-1 / (e**-1 + 2) = 0.16. Together 0.8.
    right = weights[1] + 2 * weights[2]
    np.testing.assert_allclose(out, right, rtol=rounding(path))


@pytest.mark.parametrize("alibi", ["head", "request"])
@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_b58_alibi_is_applied_at_any_block_size(path, alibi, page_size):
    case = Case(
        lengths=((1, 99), (6, 40)), num_heads_kv=2, group_size=2, page_size=page_size,
        alibi=alibi, q_type="bf16", kv_type="bf16", causal=True,
    )  # fmt: skip
    inputs = case.make(path.xp)
    inputs.check(flash_attn_varlen_func)
    biased, _ = inputs.call(flash_attn_varlen_func)
    plain, _ = case.replace(alibi="").make(path.xp).call(flash_attn_varlen_func)
    assert not np.array_equal(biased[:7], plain[:7])


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
@pytest.mark.parametrize(("kv_len", "window"), [(4, (-1, -1)), (200, (3, 0)), (1024, (-1, -1))])
def test_b59_sink_counted_once(path, num_splits, kv_len, window):
    q, k, v = mean_batch([1], [kv_len])
    v %= 4
    out, lse = attend(
        path, q, k, v, [1], [kv_len], 16, num_splits=num_splits, window_size=window,
        s_aux=np.zeros(1, np.float32),
    )  # fmt: skip
    seen = 4 if window == (3, 0) else kv_len
    np.testing.assert_allclose(out, 1.5 * seen / (seen + 1), rtol=rounding(path))
    np.testing.assert_allclose(lse, math.log(seen + 1), rtol=1e-6)


@pytest.mark.parametrize(("num_splits", "kv_len"), [(1, 4), (4, 4), (4, 512)])
def test_b61_sink_in_the_fp8_path(path, num_splits, kv_len):
    q, k, v = mean_batch([1], [kv_len])
    v %= 4
    small = [a.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for a in (k, v)]
    out, lse = attend(
        path, q.astype(BF16), *small, [1], [kv_len], 16, num_splits=num_splits, v_descale=2.0,
        s_aux=np.zeros(1, np.float32),
    )  # fmt: skip
    right = np.float32(3 * kv_len / (kv_len + 1)).astype(BF16)
    np.testing.assert_array_equal(out, float(right))
    np.testing.assert_allclose(lse, math.log(kv_len + 1), rtol=1e-6)


@pytest.mark.parametrize(("num_splits", "copies"), [(1, 1), (4, 1), (4, 256)])
def test_b62_sink_is_neither_scaled_nor_capped(path, num_splits, copies):
    q, k, v = capped(path)
    k, v = (path.xp.repeat(a, copies, 0) for a in (k, v))
    args = (1, path.array(starts([1])), 2 * copies, path.array(starts([2 * copies])))
    options = {"softcap": 1.0, "num_splits": num_splits, "return_softmax_lse": True}
    sink = path.array([0.5], np.float32)
    out, lse = flash_attn_varlen_func(q, k, v, *args, s_aux=sink, **options)
    more = math.log(copies)
    (right, _, _), right_lse = shares(math.tanh(2) + more, more, 0.5)
    np.testing.assert_allclose(path.host(out), right, rtol=rounding(path))
    np.testing.assert_allclose(path.host(lse), right_lse, atol=1e-6)
    out, lse = flash_attn_varlen_func(q, k, v, *args, **options)
    np.testing.assert_allclose(path.host(out), RIGHT, rtol=rounding(path))
    np.testing.assert_allclose(path.host(lse), RIGHT_LSE + more, atol=1e-6)
