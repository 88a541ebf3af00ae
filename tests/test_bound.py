"""The bound: what it lets through, and the planted bugs that it rejects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from cupyflash.testing import PATTERNS, Case, assert_within
from cupyflash.testing.rounding import half_ulp
from cupyflash.testing.strategies import cases


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


def tile_loop(inputs, bug="", tile=16, keeps_shift=False):
    """A small online-softmax attention in bfloat16, one tile of keys at a time.

    With ``keeps_shift`` weights are over a row's first largest score, until they are past e^30.
    """
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
            if keeps_shift:
                new = np.where(np.isinf(top) | (new > top + 30), new, top)
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


@pytest.mark.parametrize("keeps_shift", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_honest_tile_loop_is_within_the_bound(pattern, keeps_shift):
    inputs = planted_case(pattern=pattern).make()
    inputs.expected().check(*tile_loop(inputs, keeps_shift=keeps_shift))


def one_key_counts(mantissa):
    """One query; its last key has nearly all the weight, ``mantissa`` * 2^20 of the first ones."""
    inputs = Case(lengths=((1, 31),), head_dim=4, q_type="bf16", kv_type="bf16").make()
    args = inputs.args
    args["q"][:1] = args["k"][:32] = args["v"][:32] = 0
    args["q"][:1, :, :2] = 2
    # The logarithm as a sum of two numbers of 8 bits.
    power = np.log(mantissa) + 20 * np.log(2)
    args["k"][31, :, 0] = power
    args["k"][31, :, 1] = power - np.float64(args["k"][31, 0, 0])
    args["v"][31] = 7.96875
    return inputs


@pytest.mark.parametrize("mantissa", [1.0038, 1.0040, 1.0116])
def test_a_kept_shift_rounds_even_the_largest_weight(mantissa):
    """Where one key has all the weight, an error of half an ulp of P is all there is."""
    inputs = one_key_counts(mantissa)
    expected, (out, lse) = inputs.expected(), tile_loop(inputs, keeps_shift=True)
    assert abs(float(out[0, 0, 0]) - 7.96875) == 0.03125
    expected.check(out, lse)
    with pytest.raises(AssertionError, match="times the bound"):
        expected.check((expected.out - 0.0625).astype(out.dtype), lse)


def test_without_earlier_keys_the_largest_weight_is_exact():
    inputs = one_key_counts(1.0038)
    args = inputs.args
    for name in ("k", "v"):
        args[name][:16] = args[name][16:32]
    args["cu_seqlens_k"][1] = 16
    expected = inputs.expected()
    with pytest.raises(AssertionError, match="times the bound"):
        expected.check(np.full(expected.out.shape, 7.9375, args["v"].dtype))


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
    for keeps_shift in (False, True):
        inputs = case.make()
        inputs.expected().check(*tile_loop(inputs, keeps_shift=keeps_shift))
