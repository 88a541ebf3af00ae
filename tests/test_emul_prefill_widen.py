"""The Hopper prefill over an 8-bit cache on the emulator, through the public function."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from prefill import TILES, check_nan_key, widen_cases

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.explain import explain
from cupyflash.runtime.device import active_device
from cupyflash.testing import Case

KINDS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
CACHES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
CASE = Case(lengths=((140, 60), (33, 0)), num_heads_kv=2, causal=True, page_size=16, head_dim=128,
            q_type="bf16", kv_type="e4m3")  # fmt: skip


def widens():
    return any(
        "attention_fwd_sm90" in report.symbol
        and ("_e4m3_" in report.symbol or "_e5m2_" in report.symbol)
        for report in active_device().reports
    )


@given(case=widen_cases(), order=st.integers(0, 9), num_splits=st.sampled_from([0, 0, 1, 3]))
def test_any_case_in_any_order_of_warps(case, order, num_splits):
    with emulated("sm_90a", num_sms=2, seed=order):
        case.make().check(flash_attn_varlen_func, num_splits=num_splits)
        assert widens()


@pytest.mark.parametrize("pattern", ["normal", "spiky", "outlier", "ascending_v"])
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    "head_dims", [(64, 64), (128, 128), (96, 80), (192, 128), (192, 192), (256, 256)]
)
def test_every_tile(head_dims, name, pattern):
    case = TILES[name].replace(
        head_dim=head_dims[0], head_dim_v=head_dims[1], pattern=pattern, descale=True,
        q_type="bf16", kv_type="e4m3",
    )  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func, num_splits=1)
        assert widens()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "options", [{"softcap": 50.0}, {"softcap": 0.5}, {"alibi": "request"},
                {"softcap": 5.0, "alibi": "head", "window_size": (90, 20)}]
)  # fmt: skip
def test_modified_scores(head_dim, kind, cache, options):
    case = CASE.replace(lengths=((70, 200), (3, 20)), group_size=2, head_dim=head_dim,
                        descale=True, q_type=kind, kv_type=cache, **options)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func)
        assert widens()


@pytest.mark.parametrize("num_splits", [2, 3, 8])
@pytest.mark.parametrize("window", [(-1, -1), (200, 0), (300, 40)])
def test_splits_that_some_rows_do_not_reach(num_splits, window):
    case = CASE.replace(lengths=((40, 900), (30, 64), (17, -1), (1, 500)), group_size=2, sink=True,
                        num_heads_kv=1, window_size=window, causal=False, descale=True)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func, num_splits=num_splits)
        assert widens()


def test_results_repeat_and_the_counter_of_tiles_is_zero_between_launches():
    case = CASE.replace(lengths=((140, 0), (34, 50)))
    results = []
    for seed in range(3):
        with emulated("sm_90a", num_sms=2, seed=seed):
            results += [case.make().call(flash_attn_varlen_func) for _ in range(2)]
            assert widens()
    first = [array.tobytes() for array in results[0]]
    assert all([array.tobytes() for array in more] == first for more in results[1:])


def scaled(case, **scales):
    """The arrays of a case with other descales, and its result is checked."""
    inputs = case.make()
    inputs.args.update(scales)
    with emulated("sm_90a", num_sms=2):
        inputs.check(flash_attn_varlen_func)
        assert widens()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_descales_of_any_sign_and_stride(softcap):
    case = CASE.replace(softcap=softcap)
    rng = np.random.default_rng(0)
    wide = rng.uniform(0.5, 2, (2, 6)).astype(np.float32) * np.array([1, -1, -1, 1, 1, -1])
    some = wide.astype(np.float32)[:, ::3]
    every = np.broadcast_to(np.float32(0.25), (2, 2))
    scaled(case, k_descale=some, v_descale=every)
    scaled(case, k_descale=-0.5, v_descale=some[::-1])
    scaled(case, k_descale=0.0)


def test_a_negative_softmax_scale_and_one_of_zero():
    for scale in (-0.2, 0.0):
        scaled(CASE.replace(softmax_scale=scale))


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_b65_and_b68_descales_of_each_request_and_head_alone(name):
    scaled(CASE.replace(group_size=2), **{name: np.float32([[0.5, 2], [1, 4]])})


@pytest.mark.parametrize("kind", KINDS)
def test_scores_beyond_float32_run_the_tile_again(kind):
    """Key tiles are walked downwards: the first keys outgrow the weights of the last."""
    case = CASE.replace(lengths=((200, 300), (70, 500)), q_type=kind, page_size=None)
    inputs = case.make()
    k = inputs.placed["k"].view
    k[3:5], k[503:505] = 0x7E, 0x7E  # 448
    scales = np.full((2, 2), 2.0, np.float32)
    inputs.args.update(k_descale=scales, v_descale=scales / 4)
    with emulated("sm_90a", num_sms=2):
        inputs.check(flash_attn_varlen_func)
        assert widens()


def every_byte(cache):
    """What all 256 bytes stand for, as two rows of 128."""
    every = np.arange(256, dtype=np.uint8).reshape(2, 1, 128)
    return every, every.view(CACHES[cache]).astype(np.float32)


def of_one_key(q, k, v, rows, **options):
    """Attention of two requests of as many queries, over one key each."""
    starts = np.array([0, rows, 2 * rows], np.int32), np.array([0, 1, 2], np.int32)
    with emulated("sm_90a", num_sms=2):
        found = flash_attn_varlen_func(
            q, k, v, rows, starts[0], 1, starts[1], return_softmax_lse=True, **options
        )
        assert widens()
    return found


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_b71_all_256_bytes_as_values(kind, cache):
    """One key: out is its value, exactly; NaN stays NaN, and an infinity is one."""
    every, right = every_byte(cache)
    q = np.zeros((80, 1, 128), KINDS[kind])
    out, lse = of_one_key(q, np.zeros_like(every), every, 40, fp8_dtype=cache)
    np.testing.assert_array_equal(out.astype(np.float32), np.repeat(right, 40, axis=0))
    assert (lse == 0).all()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_256_bytes_as_keys(kind, cache):
    """One key: queries of one element each find that element in the log-sum-exp."""
    every, right = every_byte(cache)
    finite = np.isfinite(right)
    every = np.where(finite, every, 0)
    q = np.tile(np.eye(128, dtype=KINDS[kind])[:, None], (2, 1, 1))
    _, lse = of_one_key(q, every, np.zeros_like(every), 128, fp8_dtype=cache, softmax_scale=1.0)
    found = lse.reshape(256)
    np.testing.assert_allclose(found, np.where(finite, right, 0).reshape(256), rtol=3e-7)


@pytest.mark.parametrize(("cache", "byte"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7E)])
def test_a_nan_key_reaches_the_rows_that_see_it_and_no_others(cache, byte):
    inputs = Case(
        lengths=((150, 0),), causal=True, head_dim=128, q_type="bf16", kv_type=cache
    ).make()
    with emulated("sm_90a", num_sms=2):
        check_nan_key(inputs, byte)
        assert widens()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 8}, "page size 8"),
        ({"page_size": 20}, "page size 20"),
    ],
)
def test_what_it_does_not_take_goes_to_the_portable_kernel_with_a_reason(change, reason):
    inputs = CASE.replace(**change).make()
    with emulated("sm_90a", num_sms=2):
        inputs.check(flash_attn_varlen_func)
        assert not widens()
        assert reason in explain(**inputs.args).kernels


def test_decode_steps_beside_it():
    """Requests of one query go to the decode kernel, at the same time."""
    case = CASE.replace(lengths=((1, 300), (150, 90), (1, 40)), group_size=4, descale=True)
    with emulated("sm_90a", num_sms=4):
        case.make().check(flash_attn_varlen_func)
        assert widens()
        assert any("decode" in report.symbol for report in active_device().reports)
