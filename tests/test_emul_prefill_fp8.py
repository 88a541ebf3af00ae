"""The 8-bit Hopper prefill on the emulator, through the public function."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from prefill import TILES, check_nan_key, fp8_cases

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.explain import explain
from cupyflash.runtime.device import active_device
from cupyflash.testing import Case

E4M3 = {"q_type": "e4m3", "kv_type": "e4m3"}
LSE, NO_LSE = ({"return_softmax_lse": wanted} for wanted in (True, False))
"""Without, products with a column of ones add the weights up, up to head size 128."""
SUMS = pytest.mark.parametrize("sums", [LSE, NO_LSE], ids=["lse", "ones"])


def runs_fp8():
    return any("attention_fwd_sm90_fp8" in report.symbol for report in active_device().reports)


@given(
    case=fp8_cases(),
    order=st.integers(0, 9),
    num_splits=st.sampled_from([0, 0, 1, 3]),
    sums=st.sampled_from([NO_LSE, LSE]),
)
def test_any_case_in_any_order_of_warps(case, order, num_splits, sums):
    with emulated("sm_90a", num_sms=2, seed=order):
        case.make().check(flash_attn_varlen_func, num_splits=num_splits, **sums)
        assert runs_fp8()


CASES = {**TILES, "ragged": TILES["ragged"].replace(descale=True)}


@pytest.mark.parametrize(
    ("pattern", "sums"),
    [("normal", LSE), ("normal", NO_LSE), ("spiky", LSE), ("spiky", NO_LSE), ("outlier", NO_LSE),
     ("opposed", NO_LSE), ("ascending_v", LSE)],
    ids=["normal", "normal-ones", "spiky", "spiky-ones", "outlier-ones", "opposed-ones",
         "ascending_v"],
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (96, 80), (256, 192)])
def test_every_tile(head_dims, name, pattern, sums):
    case = CASES[name].replace(
        head_dim=head_dims[0], head_dim_v=head_dims[1], pattern=pattern, **E4M3
    )
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func, num_splits=1, **sums)
        assert runs_fp8()


@SUMS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [{"softcap": 50.0}, {"softcap": 0.5}, {"alibi": "request"},
                {"softcap": 5.0, "alibi": "head", "window_size": (90, 20)}]
)  # fmt: skip
def test_modified_scores(head_dim, options, sums):
    case = Case(lengths=((70, 200), (3, 20)), group_size=2, head_dim=head_dim, causal=True,
                descale=True, page_size=16, **E4M3).replace(**options)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func, **sums)
        assert runs_fp8()


@SUMS
@pytest.mark.parametrize("num_splits", [2, 3, 8])
@pytest.mark.parametrize("window", [(-1, -1), (200, 0), (300, 40)])
def test_splits_that_some_rows_do_not_reach(num_splits, window, sums):
    case = Case(lengths=((20, 900), (30, 64), (17, -1), (1, 500)), group_size=2, sink=True,
                page_size=16, window_size=window, descale=True, **E4M3)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func, num_splits=num_splits, **sums)
        assert runs_fp8()


def test_merged_log_sum_exps_do_not_carry_the_scale_of_weights():
    """The logarithm of sums 2^8 times as large has an ulp of its own size."""
    case = Case(lengths=((1, 65), (1, 9), (130, 19)), num_heads_kv=2, group_size=8, head_dim=16,
                head_dim_v=64, page_size=16, causal=True, window_size=(16, 16), softmax_scale=1.0,
                sink=True, descale=True, pattern="ascending_v", seed=353, **E4M3)  # fmt: skip
    with emulated("sm_90a", num_sms=2, seed=2):
        case.make().check(flash_attn_varlen_func, num_splits=3)
        assert runs_fp8()


def test_more_requests_than_are_sorted():
    case = Case(lengths=tuple((1 + 7 * i % 19, i % 40) for i in range(140)), causal=True,
                page_size=16, **E4M3)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func)
        assert runs_fp8()


def test_results_repeat_and_the_counter_of_tiles_is_zero_between_launches():
    case = Case(lengths=((140, 0), (20, 50)), num_heads_kv=2, causal=True, **E4M3)
    results = []
    for seed in range(3):
        with emulated("sm_90a", num_sms=2, seed=seed):
            results += [case.make().call(flash_attn_varlen_func) for _ in range(2)]
    first = [array.tobytes() for array in results[0]]
    assert all([array.tobytes() for array in more] == first for more in results[1:])


def scaled(case, **scales):
    """The arrays of a case with other descales, and its result is checked."""
    inputs = case.make()
    inputs.args.update(scales)
    for sums in (LSE, NO_LSE):
        with emulated("sm_90a", num_sms=2):
            inputs.check(flash_attn_varlen_func, **sums)
            assert runs_fp8()


def test_descales_of_any_sign_and_stride():
    case = Case(lengths=((140, 60), (30, 0)), num_heads_kv=2, causal=True, page_size=16, **E4M3)
    rng = np.random.default_rng(0)
    wide = rng.uniform(0.5, 2, (2, 6)).astype(np.float32) * np.array([1, -1, -1, 1, 1, -1])
    some = wide.astype(np.float32)[:, ::3]
    every = np.broadcast_to(np.float32(0.25), (2, 2))
    scaled(case, q_descale=some, k_descale=some[::-1], v_descale=every)
    scaled(case, q_descale=-0.5, k_descale=every, v_descale=some)
    scaled(case, q_descale=0.0)


def test_a_negative_softmax_scale_and_one_of_zero():
    for scale in (-0.2, 0.0):
        scaled(Case(lengths=((140, 60),), causal=True, softmax_scale=scale, **E4M3))


@SUMS
def test_scores_beyond_float32_run_the_tile_again(sums):
    """Key tiles are walked downwards: the first keys outgrow the weights of the last by 2^200."""
    case = Case(lengths=((200, 300), (70, 500)), num_heads_kv=2, causal=True, **E4M3)
    inputs = case.make()
    k = inputs.placed["k"].view
    k[3:5], k[503:505] = 0x7E, 0x7E  # 448
    inputs.args["q_descale"] = np.full((2, 2), 2.0, np.float32)
    with emulated("sm_90a", num_sms=2):
        inputs.check(flash_attn_varlen_func, **sums)
        assert runs_fp8()


@SUMS
@pytest.mark.parametrize("powers", [(96, 99, 100, 101, 104), (120, 124, 125, 126, 127, 128, 131)])
def test_a_key_that_outgrows_the_weights_of_those_before_it(powers, sums):
    """One that is walked after 128 others of score 0 has a weight of 2^power against theirs."""
    case = Case(lengths=((40, 216),), **E4M3)
    for power in powers:
        inputs = case.replace(softmax_scale=power * float(np.log(2)) / 64).make()
        inputs.placed["q"].view[:40] = 0x38  # 1
        inputs.placed["k"].view[:256] = 0
        inputs.placed["k"].view[3] = 0x38
        with emulated("sm_90a", num_sms=2):
            inputs.check(flash_attn_varlen_func, **sums)
            assert runs_fp8()


def test_fp16_results():
    inputs = Case(lengths=((140, 60),), group_size=2, descale=True, **E4M3).make()
    out = np.full(inputs.placed["out"].view.shape, np.nan, np.float16)
    with emulated("sm_90a", num_sms=2):
        got, lse = flash_attn_varlen_func(**inputs.args, out=out, return_softmax_lse=True)
        assert runs_fp8()
    inputs.expected(p_dtype="e4m3", out_dtype="fp16").check(got, lse)


def test_a_nan_key_reaches_the_rows_that_see_it_and_no_others():
    inputs = Case(lengths=((150, 0),), causal=True, **E4M3).make()
    with emulated("sm_90a", num_sms=2):
        check_nan_key(inputs, 0x7F)
        assert runs_fp8()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 8}, "page size 8"),
        ({"head_dim": 72}, "multiples of 16"),
        ({"kv_type": "e5m2"}, "e4m3"),
    ],
)
def test_what_it_does_not_take_goes_to_the_portable_kernel_with_a_reason(change, reason):
    case = Case(lengths=((40, 3),), head_dim=128, **E4M3).replace(**change)
    inputs = case.make()
    with emulated("sm_90a", num_sms=2):
        fa_version = 2 if case.head_dim % 16 else None  # version 3 needs multiples of 16
        inputs.check(flash_attn_varlen_func, fa_version=fa_version)
        assert not runs_fp8()
        if fa_version is None:
            assert reason in explain(**inputs.args).kernels


def test_b64_small_weights_are_not_lost_from_the_sum_alone():
    """V = 1 and a peaked softmax over 4096 keys: out stays 1."""
    for pattern in ("spiky", "outlier"):
        inputs = Case(
            lengths=((64, 4032),), page_size=64, pattern=pattern, seed=3, head_dim=128, **E4M3
        ).make()
        inputs.args["v"] = np.full_like(inputs.args["v"], 0x38)  # 1
        with emulated("sm_90a", num_sms=2):
            out = flash_attn_varlen_func(**inputs.args)
            assert runs_fp8()
        np.testing.assert_allclose(out[:64].astype(np.float32), 1, atol=0.02)


@pytest.mark.parametrize("keys", [127, 128, 129, 255, 256, 257, 384, 512])
def test_lengths_around_multiples_of_a_key_tile_are_no_worse(keys):
    """The largest weight on the first key, or on the last one."""
    case = Case(lengths=((40, keys - 40),), page_size=16, head_dim=128, **E4M3)
    for at in (0, keys - 1):
        inputs = case.make()
        page, slot = inputs.args["block_table"][0, at // 16], at % 16
        inputs.args["k"][page, slot] = 0x60  # 32
        for sums in (LSE, NO_LSE):
            with emulated("sm_90a", num_sms=2):
                inputs.check(flash_attn_varlen_func, **sums)
                assert runs_fp8()


@pytest.mark.parametrize("name", ["k_descale", "v_descale", "q_descale"])
def test_b65_and_b68_descales_of_each_request_and_head_alone(name):
    case = Case(lengths=((40, 20), (35, 0)), num_heads_kv=2, group_size=2, causal=True, **E4M3)
    scaled(case, **{name: np.float32([[0.5, 2], [1, 4]])})


def test_b71_all_256_bytes_as_values():
    """One key: out is its value, exactly; NaN stays NaN."""
    every = np.arange(256, dtype=np.uint8).reshape(2, 1, 128)
    q = np.zeros((80, 1, 128), np.uint8)
    starts = np.array([0, 40, 80], np.int32), np.array([0, 1, 2], np.int32)
    with emulated("sm_90a", num_sms=2):
        out, lse = flash_attn_varlen_func(
            q, np.zeros_like(every), every, 40, starts[0], 1, starts[1], return_softmax_lse=True
        )
        assert runs_fp8()
    right = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), np.repeat(right, 40, axis=0))
    assert (lse == 0).all()


def test_an_output_is_of_the_weights_as_they_are_rounded():
    """V = 1 in all: with a column of ones the quotient is 1, whatever rounding took away."""
    inputs = Case(lengths=((130, 200),), head_dim=128, pattern="spiky", causal=True, **E4M3).make()
    inputs.args["v"] = np.full_like(inputs.args["v"], 0x38)  # 1
    with emulated("sm_90a", num_sms=2):
        out = flash_attn_varlen_func(**inputs.args)
        assert runs_fp8()
    assert (out[:130].astype(np.float32) == 1).all()
