"""The oracle against hand-worked values, and the bound against planted bugs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyflash.testing import (
    DTYPES,
    attention_oracle,
    merge_oracle,
    saturate,
    varlen_oracle,
    write_oracle,
)
from cupyflash.testing.rounding import half_ulp


def one_key(value, dim=1):
    return np.full((1, 1, dim), value, np.float64)


def test_two_keys_by_hand():
    q, k = one_key(1.0), np.array([2.0, 0.0]).reshape(2, 1, 1)
    v = np.array([1.0, 3.0]).reshape(2, 1, 1)
    out, lse = attention_oracle(q, k, v, softmax_scale=0.5)
    e = math.e
    assert out.item() == pytest.approx((e + 3) / (e + 1), abs=1e-15)
    assert lse.item() == pytest.approx(math.log(e + 1), abs=1e-15)


def test_definition_with_plain_loops():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((n, h, 4)) for n, h in ((3, 4), (5, 2), (5, 2)))
    slopes, sinks = rng.random(4), rng.standard_normal(4)
    out, lse = attention_oracle(
        q, k, v, window_size=(2, 1), softcap=1.5, alibi_slopes=slopes, s_aux=sinks
    )
    for i in range(3):
        for h in range(4):
            total, sums = math.exp(sinks[h]), np.zeros(4)
            for j in range(5):
                position = i + 5 - 3
                if not position - 2 <= j <= position + 1:
                    continue
                score = sum(q[i, h, d] * k[j, h // 2, d] for d in range(4)) / 2
                score = 1.5 * math.tanh(score / 1.5) - slopes[h] * abs(position - j)
                total += math.exp(score)
                sums += math.exp(score) * v[j, h // 2]
            np.testing.assert_allclose(out[i, h], sums / total, rtol=1e-13)
            assert lse[h, i] == pytest.approx(math.log(total), rel=1e-13)


def test_causal_is_aligned_at_the_bottom_right():
    q, k = np.zeros((2, 1, 1)), np.zeros((4, 1, 1))
    v = np.arange(4.0).reshape(4, 1, 1)
    out, lse = attention_oracle(q, k, v, causal=True)
    assert out.ravel().tolist() == [1.0, 1.5]
    np.testing.assert_allclose(lse, np.log([[3, 4]]))


def test_rows_that_see_no_key():
    q, k, v = np.ones((3, 1, 1)), np.ones((1, 1, 1)), np.ones((1, 1, 1))
    out, lse = attention_oracle(q, k, v, causal=True)
    assert out.ravel().tolist() == [0, 0, 1]
    assert lse[0, :2].tolist() == [-np.inf, -np.inf]
    out, lse = attention_oracle(q, k, v, causal=True, s_aux=np.array([2.5]))
    assert out.ravel()[:2].tolist() == [0, 0]
    assert lse[0, :2].tolist() == [2.5, 2.5]


def test_order_of_softcap_and_alibi():
    q, k = one_key(2.0), np.ones((3, 1, 1))
    v = np.arange(3.0).reshape(3, 1, 1)
    out, _ = attention_oracle(q, k, v, softmax_scale=1.0, softcap=1.0, alibi_slopes=np.array([1.0]))
    assert out.item() == pytest.approx(1.57521, abs=1e-5)


def test_pages_in_any_order_are_the_packed_sequence():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, 8)) for n in (3, 11, 11))
    packed = varlen_oracle(q, k, v, 3, np.array([0, 3]), 11, np.array([0, 11]))
    table = np.array([[2, 0, 3, 99]])
    cache_k, cache_v = np.full((5, 4, 2, 8), np.nan), np.full((5, 4, 2, 8), np.nan)
    for cache, rows in ((cache_k, k), (cache_v, v)):
        for token in range(11):
            cache[table[0, token // 4], token % 4] = rows[token]
    paged = varlen_oracle(
        q, cache_k, cache_v, 3, np.array([0, 3]), 11, seqused_k=np.array([11]), block_table=table
    )
    for left, right in zip(packed, paged, strict=True):
        np.testing.assert_array_equal(left, right)


def test_rows_of_no_request_are_nan():
    q, k = np.ones((4, 1, 2)), np.ones((2, 1, 2))
    out, lse = varlen_oracle(q, k, k, 2, np.array([0, 2]), 2, np.array([0, 2]))
    assert np.isnan(out[2:]).all()
    assert np.isnan(lse[:, 2:]).all()
    assert np.isfinite(out[:2]).all()


def test_merge_by_hand():
    prefix = (np.zeros((1, 1, 1)), np.log([[2.0]]))
    suffix = (np.ones((1, 1, 1)), np.log([[8.0]]))
    out, lse = merge_oracle(prefix, suffix)
    assert out.item() == pytest.approx(0.8)
    assert lse.item() == pytest.approx(math.log(10))
    out, lse = merge_oracle(prefix, suffix, s_aux=np.log([10.0]))
    assert out.item() == pytest.approx(0.4)
    assert lse.item() == pytest.approx(math.log(20))


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_merge_with_an_empty_state(empty):
    nothing = (np.full((1, 1, 2), np.nan), np.array([[empty]]))
    something = (np.full((1, 1, 2), 2.0), np.array([[1.5]]))
    out, lse = merge_oracle(nothing, something)
    assert out.tolist() == [[[2, 2]]]
    assert lse.tolist() == [[1.5]]
    out, lse = merge_oracle(nothing, nothing)
    assert out.tolist() == [[[0, 0]]]
    assert lse.tolist() == [[-np.inf]]


def test_write_oracle_skips_and_saturates():
    key = np.array([1.0, 1e4, -np.inf, np.nan], np.float32).reshape(4, 1, 1)
    cache = np.zeros((2, 2, 1, 1), np.uint8)
    written = write_oracle(key, cache, [3, 0, -1, 1], 2.0)
    assert written.ravel().tolist() == [0x7E, 0x7F, 0, 0x30]
    assert not cache.any()


@pytest.mark.parametrize(
    ("kind", "values", "stored"),
    [
        ("e4m3", [448, 464, 465, 1e4, np.inf, -np.inf, np.nan], [*[0x7E] * 5, 0xFE, 0x7F]),
        ("e5m2", [57344, 61440, 1e6, np.inf, -np.inf, np.nan], [*[0x7B] * 4, 0xFB, 0x7F]),
    ],
)
def test_saturate(kind, values, stored):
    assert saturate(np.array(values), DTYPES[kind]).view(np.uint8).tolist() == stored


@pytest.mark.parametrize("kind", DTYPES)
def test_half_ulp_is_half_the_distance_to_the_next_number(kind):
    dtype = DTYPES[kind]
    bits = np.arange(1, 0x7C if dtype.itemsize == 1 else 0x7BFF, 37 if dtype.itemsize > 1 else 1)
    integer = np.dtype(f"u{dtype.itemsize}")
    if dtype.itemsize == 4:
        bits = bits << 16
    low = bits.astype(integer).view(dtype).astype(np.float64)
    high = (bits + 1).astype(integer).view(dtype).astype(np.float64)
    usable = np.isfinite(high) & (low > 0)
    found = [half_ulp(x, dtype) for x in low[usable]]
    np.testing.assert_array_equal(found, (high - low)[usable] / 2)
