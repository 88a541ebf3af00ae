"""The 8-bit Hopper prefill on a GPU: random cases, repeats, long requests, long sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill import LONG, check_many_repeats, fp8_cases
from repeats import check_repeats

from cupyflash import quantize_fp8
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.explain import explain
from cupyflash.testing import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
E4M3 = {"q_type": "e4m3", "kv_type": "e4m3"}


@settings(max_examples=100)
@given(
    case=fp8_cases(most_requests=6), num_splits=st.sampled_from([0, 0, 1, 3, 7]), lse=st.booleans()
)
@pytest.mark.parametrize("share", range(12))
def test_any_case(case, num_splits, lse, share):
    import cupy

    options = {"num_splits": num_splits, "fa_version": 3, "return_softmax_lse": lse}
    check_repeats(case.make(cupy), flash_attn_varlen_func, {"p_dtype": "e4m3"}, **options)


CASES = {
    **LONG,
    "cap": Case(lengths=((700, 900),), softcap=20.0, causal=True, page_size=64, sink=True),
}


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("pattern", ["normal", "spiky", "outlier", "one_hot"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_long_requests(name, head_dim, pattern, lse):
    import cupy

    case = CASES[name].replace(head_dim=head_dim, pattern=pattern, descale=True, **E4M3)
    inputs = case.make(cupy)
    assert explain(**inputs.args).kernels.startswith("Hopper 8-bit prefill")
    inputs.check(flash_attn_varlen_func, fa_version=3, return_softmax_lse=lse)


@pytest.mark.parametrize("lse", [True, False])
def test_scores_beyond_float32_run_the_tile_again(lse):
    import cupy

    inputs = Case(lengths=((200, 300), (70, 500)), num_heads_kv=2, causal=True, **E4M3).make(cupy)
    k = inputs.placed["k"].view
    k[3:5] = k[503:505] = 0x7E
    inputs.args["q_descale"] = cupy.full((2, 2), 2, np.float32)
    inputs.check(flash_attn_varlen_func, fa_version=3, return_softmax_lse=lse)


def test_repeats_are_equal_bit_for_bit():
    check_many_repeats(1000, **E4M3)


def test_sums_of_128k_keys_keep_their_value():
    """Values of mean 1: a sum that is kept in 14 bits throughout would be short by a tenth."""
    import cupy

    keys, rows = 1 << 17, 64
    rng = cupy.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 1, 128), dtype=np.float32) for n in (rows, keys, keys))
    found = [quantize_fp8(x) for x in (q, k, v + 1)]
    starts = [cupy.asarray([0, n], np.int32) for n in (rows, keys)]
    scales = {f"{name}_descale": scale for name, (_, scale) in zip("qkv", found, strict=True)}
    arrays = [array for array, _ in found]
    options = {"num_splits": 1, "fa_version": 3, **scales}
    out = flash_attn_varlen_func(*arrays, rows, starts[0], keys, starts[1], **options)
    table = cupy.asarray(_e4m3_values())
    q, k, v = (table[bits_] * float(scale[0]) for bits_, scale in found)
    score = q[:, 0] @ k[:, 0].T * 128**-0.5
    weight = cupy.exp(score - score.max(axis=1, keepdims=True))
    right = weight @ v[:, 0] / weight.sum(axis=1, keepdims=True)
    mean = out.get().astype(np.float64).mean() / float(right.mean()) - 1
    assert abs(mean) < 3e-3


def _e4m3_values():
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
