"""Public reports on empty rows, masks and the LSE; docs/public_reports.md names them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, attend, check, expected, mean_batch, random_batch, run, starts

from cupyflash import flash_attn_varlen_func

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_b01_no_keys_is_zero_and_minus_infinity(path):
    batch = (*mean_batch([3, 2], [0, 5], 4, 2, dtype=BF16), [3, 2], [0, 5])
    out, lse = attend(path, *batch)
    assert (out[:3] == 0).all()
    assert np.isneginf(lse[:, :3]).all()
    assert (out[3:] == 2).all()
    np.testing.assert_allclose(lse[:, 3:], 1.609438, atol=1e-5)


def test_b02_more_queries_than_keys_under_causal(path):
    out, lse = attend(path, *mean_batch([5], [3], dtype=BF16), [5], [3], causal=True)
    assert out[:, 0, 0].tolist() == [0, 0, 0, 0.5, 1]
    np.testing.assert_allclose(lse[0], [-np.inf, -np.inf, 0, 0.693147, 1.098612], atol=1e-5)


def test_b04_fewer_tokens_than_requests(path):
    q, k, v = random_batch([1], [1], 21, 7, 120, dtype=BF16)
    v[...] = 1
    out, lse = attend(path, q, k, v, [0, 0, 0, 1], [0, 0, 0, 1])
    assert (out == 1).all()
    grouped = np.einsum("hgd,hd->hg", q[0].reshape(7, 3, 120).astype(float), k[0].astype(float))
    np.testing.assert_allclose(lse[:, 0], grouped.ravel() / math.sqrt(120), atol=1e-5)


@pytest.mark.parametrize("num_splits", [2, 8])
@pytest.mark.parametrize("page_size", [None, 16])
def test_b05_an_empty_request_writes_its_own_lse_only(path, num_splits, page_size):
    kv_lens = np.random.default_rng(5).integers(30, 65, 64)
    kv_lens[[1, 10]] = 0
    batch = random_batch([1] * 64, kv_lens, 8, 2, dtype=BF16)
    args = arguments(path, *batch, [1] * 64, kv_lens, page_size, num_splits=num_splits)
    _, lse = check(path, args)
    assert np.argwhere(np.isneginf(lse).any(axis=0)).ravel().tolist() == [1, 10]


def test_b07_no_queries_but_keys(path):
    q, k, v = mean_batch([150, 0, 150], [100, 100, 100])
    out, lse = attend(path, q, k, v, [150, 0, 150], [100, 100, 100])
    np.testing.assert_allclose(out, 49.5, rtol=1e-6)
    np.testing.assert_allclose(lse, math.log(100), rtol=1e-6)


def test_b08_nothing_is_stored_past_the_last_row(path):
    q_lens = [1, 0, 129, 1]
    q, k, v = random_batch([132], q_lens, 2, 2, dtype=BF16)
    args = arguments(path, q, k, v, q_lens, q_lens, causal=True)
    behind = np.append(starts(q_lens), np.int32(2**30))
    args["cu_seqlens_q"] = path.array(behind)[:-1]
    args["cu_seqlens_k"] = path.array(behind)[:-1]
    out, lse = check(path, args)
    assert np.isnan(out[131:]).all()
    assert np.isnan(lse[:, 131:]).all()


@pytest.mark.parametrize("kv_len", [64, 1])
def test_b10_every_logit_far_below_any_finite_mask(path, kv_len):
    q = np.ones((1, 1, 128), BF16)
    k = np.full((kv_len, 1, 128), -1536, BF16)
    k[0] = -1472
    v = random_batch([1], [kv_len], dim=128, dtype=BF16)[2]
    out, lse = attend(path, q, k, v, [1], [kv_len])
    np.testing.assert_array_equal(out[0], v[0].astype(float))
    np.testing.assert_allclose(lse, -16653.779, atol=2e-3)


def test_b11_a_masked_first_tile_leaves_the_maximum_alone(large_path):
    dtype = np.float32 if large_path.name == "numpy" else np.float16
    q = np.ones((88, 14, 128), dtype)
    k = np.full((448, 2, 128), -8, dtype)
    v = np.arange(448, dtype=dtype).repeat(256).reshape(448, 2, 128)
    out, lse = attend(large_path, q, k, v, [88], [448], causal=True)
    np.testing.assert_allclose(out[2], 181, atol=0.07)
    np.testing.assert_allclose(lse[:, 2], -84.6153, atol=1e-3)


def test_b11_the_same_in_small(path):
    dtype = np.float32 if path.name == "numpy" else np.float16
    q, k = np.ones((24, 4, 128), dtype), np.full((152, 1, 128), -8, dtype)
    v = np.arange(152, dtype=dtype).repeat(128).reshape(152, 1, 128)
    out, lse = attend(path, q, k, v, [24], [152], causal=True)
    np.testing.assert_allclose(out[2], 65, atol=0.04)
    np.testing.assert_allclose(lse[:, 2], np.log(131) - 8 * 128**0.5, atol=1e-3)


def test_b13_wide_heads_at_129_tokens_repeat_bit_by_bit(large_path):
    batch = random_batch([129], [129], 16, 2, 256, dtype=np.float16)
    args = arguments(large_path, *batch, [129], [129], causal=True)
    first = check(large_path, args)
    for _ in range(20 if large_path.name == "numpy" else 200):
        for left, right in zip(run(large_path, args), first, strict=True):
            np.testing.assert_array_equal(left, right)


def test_b13_wide_heads_of_one_group_repeat(path):
    batch = random_batch([129], [129], 2, 1, 256, dtype=np.float16)
    args = arguments(path, *batch, [129], [129], causal=True)
    first = check(path, args)
    for left, right in zip(run(path, args), first, strict=True):
        np.testing.assert_array_equal(left, right)


def test_b14_head_size_72_of_few_tokens(path):
    """The emulator's memory holds poison where nothing was written."""
    batch = random_batch([70], [70], 2, 2, 72, dtype=np.float16)
    check(path, arguments(path, *batch, [70], [70]))


def test_b14_head_size_72_reads_nothing_uninitialised(large_path):
    batch = random_batch([512], [512], 16, 16, 72, dtype=np.float16)
    args = arguments(large_path, *batch, [512], [512])
    first = check(large_path, args)
    other = arguments(
        large_path, *random_batch([64], [64], 4, 4, 128, dtype=np.float16), [64], [64]
    )
    for _ in range(3):
        run(large_path, other)
        np.testing.assert_array_equal(run(large_path, args)[0], first[0])


@pytest.mark.parametrize("dim", [40, 112, 120, 160, 224])
def test_b16_a_head_size_works_or_is_refused_with_those_that_do(path, dim):
    args = arguments(path, *random_batch([3], [20], dim=dim, dtype=np.float16), [3], [20])
    refusal = ""
    try:
        out = flash_attn_varlen_func(**args)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "64" in refusal
    else:
        expected(path, args).check(path.host(out))


@pytest.mark.parametrize("dim", [20, 257, 512])
def test_b16_a_head_size_of_no_kernel_is_refused(path, dim):
    args = arguments(path, *random_batch([3], [20], dim=dim, dtype=np.float16), [3], [20])
    with pytest.raises(ValueError, match=f"head size {dim}"):
        flash_attn_varlen_func(**args)
