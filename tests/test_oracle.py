"""The oracle against hand-worked values, and the bound against planted bugs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from cupyflash.testing import (
    DTYPES,
    LAYOUTS,
    PATTERNS,
    Case,
    assert_within,
    attention_oracle,
    merge_oracle,
    place,
    saturate,
    varlen_oracle,
    write_oracle,
)
from cupyflash.testing.rounding import half_ulp
from cupyflash.testing.strategies import cases


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


# The bound


def test_bound_is_twice_the_baseline_and_half_an_ulp():
    oracle = np.array([1.0, 2.0])
    baseline = np.array([1.25, 2.0])
    edge = 2 * 0.25 + half_ulp(2.0, np.float32)
    assert_within(np.array([1.0, 2.5], np.float32), oracle, baseline)
    with pytest.raises(AssertionError, match=r"off by 0\.50"):
        assert_within(np.array([1.0, 2 + edge * 1.001], np.float32), oracle, baseline)


@pytest.mark.parametrize(
    ("actual", "right"), [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (-np.inf, np.inf)]
)
def test_special_values_come_first(actual, right):
    oracle, far = np.array([0.0, right]), np.array([1e9, 1e9])
    with pytest.raises(AssertionError, match="wrong NaN or infinity"):
        assert_within(np.array([0.0, actual], np.float32), oracle, far)


def test_special_values_that_agree_pass():
    oracle = np.array([np.nan, -np.inf, np.inf, 1e6])
    stored = np.array([np.nan, -np.inf, np.inf, np.inf], np.float16)
    assert_within(stored, oracle, oracle)


def test_message_names_the_worst_element():
    case = Case(lengths=((2, 3), (3, 4)), group_size=2, seed=4)
    inputs = case.make()
    expected = inputs.expected()
    wrong = expected.out.copy()
    wrong[3, 1, 7] += 1
    with pytest.raises(AssertionError, match="request 1, row 1, head 1, dim 7"):
        expected.check(wrong.astype(np.float32))
    lse = expected.lse.copy()
    lse[1, 0] -= 1
    with pytest.raises(AssertionError, match="lse at request 0, row 0, head 1"):
        expected.check(expected.out.astype(np.float32), lse.astype(np.float32))


def test_a_row_that_should_be_nan_must_be_nan():
    inputs = Case(lengths=((2, 3),)).make()
    inputs.args["q"][1] = np.nan
    expected = inputs.expected()
    assert np.isnan(expected.out[1]).all()
    right = [expected.out.astype(np.float32), expected.lse.astype(np.float32)]
    expected.check(*right)
    right[0][1] = 0
    with pytest.raises(AssertionError, match="row 1"):
        expected.check(*right)


def test_everything_but_the_strategies_works_without_hypothesis_and_cupy():
    script = (
        "import sys; sys.modules['hypothesis'] = sys.modules['cupy'] = None\n"
        "from cupyflash import flash_attn_varlen_func as f\n"
        "from cupyflash.testing import Case; Case(lengths=((2, 3),)).make().check(f)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


# Planted bugs in a tile loop


def tile_loop(inputs, bug="", tile=16):
    """A small online-softmax attention in bfloat16, one tile of keys at a time."""
    args, case = inputs.args, inputs.case
    out, lse = inputs.placed["out"].view, inputs.placed["lse"].view
    starts_q, starts_k = args["cu_seqlens_q"], args["cu_seqlens_k"]
    kv_heads, group = case.num_heads_kv, case.group_size
    for request, head in np.ndindex(len(case.lengths), case.num_heads_q):
        rows = slice(starts_q[request], starts_q[request + 1])
        kv_head = head % kv_heads if bug == "gqa" else head // group
        k, v = (
            args[n][starts_k[request] : starts_k[request + 1], kv_head].astype(np.float32)
            for n in "kv"
        )
        q = args["q"][rows, head].astype(np.float32) * np.float32(case.head_dim**-0.5)
        top = np.full(len(q), -np.inf, np.float32)
        total, acc = np.zeros(len(q), np.float32), np.zeros((len(q), v.shape[1]), np.float32)
        position = np.arange(len(q)) + len(k) - len(q) + (bug == "causal")
        end = len(k) // tile * tile if bug == "tail" else len(k)
        for begin in range(0, end, tile):
            s = q @ k[begin : begin + tile].T
            key = np.arange(begin, begin + s.shape[1])
            s = np.where(key <= position[:, None], s, np.float32(-np.inf))
            new = np.maximum(top, s.max(axis=1))
            shift = np.where(np.isinf(new), np.float32(0), new)
            p = np.exp(s - shift[:, None])
            rescale = np.exp(top - shift)
            total = total * rescale + p.sum(axis=1)
            low = p.astype(ml_dtypes.bfloat16).astype(np.float32)
            if bug != "rescale":
                acc = acc * rescale[:, None]
            acc = acc + low @ v[begin : begin + tile]
            top = new
        some = total > 0
        out[rows, head] = np.where(some[:, None], acc / np.where(some, total, 1)[:, None], 0)
        lse[head, rows] = np.where(some, top + np.log(np.where(some, total, 1)), -np.inf)
    return out, lse


def planted_case(**more):
    lengths = ((1, 40), (20, 23), (0, 5), (7, 0))
    return Case(
        lengths=lengths, num_heads_kv=2, group_size=3, causal=True, q_type="bf16", kv_type="bf16",
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_honest_tile_loop_is_within_the_bound(pattern):
    inputs = planted_case(pattern=pattern).make()
    inputs.expected().check(*tile_loop(inputs))


@pytest.mark.parametrize("bug", ["causal", "gqa", "tail", "rescale"])
@pytest.mark.parametrize("seed", range(3))
def test_planted_bug_is_rejected(bug, seed):
    inputs = planted_case(seed=seed).make()
    with pytest.raises(AssertionError, match="times the bound") as failure:
        inputs.expected().check(*tile_loop(inputs, bug))
    times = float(str(failure.value).split(", ")[-1].split(" times")[0].split()[-1])
    assert times > 10


@given(
    cases(
        page_size=None, causal=True, window_size=(-1, -1), softcap=0.0, softmax_scale=None,
        alibi="", sink=False, q_type="bf16", kv_type="bf16", descale=False,
    )
)  # fmt: skip
def test_honest_tile_loop_is_within_the_bound_for_any_case(case):
    inputs = case.make()
    inputs.expected().check(*tile_loop(inputs))


# Cases


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 4, 3, 8), (0, 2, 8)])
def test_place_keeps_values_and_sees_a_write_outside(layout, shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed = place(values, layout)
    np.testing.assert_array_equal(placed.view, values)
    assert placed.view.strides[-1] == 4
    placed.view[...] = -1
    placed.assert_padding_intact()
    placed.buffer[-1] = 5
    with pytest.raises(AssertionError, match="outside of the array"):
        placed.assert_padding_intact()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts_differ_in_memory(layout):
    values = np.zeros((3, 2, 8), np.float32)
    assert place(values, layout).view.strides != place(values).view.strides


@given(cases())
def test_equal_cases_give_equal_bits(case):
    first, second = case.make(), case.make()
    for name in "qkv":
        assert first.args[name].tobytes() == second.args[name].tobytes()


@given(cases())
def test_what_must_not_be_read_is_poison(case):
    inputs = case.make()
    kv_lens = case.kv_lens
    if case.page_size is None:
        tail = inputs.args["k"][sum(kv_lens) :]
    else:
        owned = np.zeros(inputs.args["k"].shape[:2], bool)
        table = inputs.args["block_table"]
        for request, length in enumerate(kv_lens):
            token = np.arange(length)
            page = table[request, token // case.page_size]
            owned[page, token % case.page_size] = True
            assert (table[request, -(-length // case.page_size) :] == 2**31 - 1).all()
        tail = inputs.args["k"][~owned]
    if tail.dtype == np.uint8:
        assert (tail == 0x7F).all()
    else:
        assert np.isnan(tail.astype(np.float32)).all()


def test_a_write_to_a_row_of_no_request_is_seen():
    inputs = Case(lengths=((2, 3),)).make()

    def writes_everywhere(**args):
        args["out"][...] = 0
        return args["out"], args["lse"]

    with pytest.raises(AssertionError, match=r"rows past cu_seqlens_q\[-1\]=2 were written"):
        inputs.call(writes_everywhere)
