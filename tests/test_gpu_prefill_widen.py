"""The Hopper prefill over an 8-bit cache on a GPU: random cases, repeats, long requests."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill import LONG, check_many_repeats, widen_cases
from repeats import check_repeats

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.explain import explain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


@pytest.mark.parametrize("pattern", ["normal", "spiky", "outlier", "one_hot"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("types", [("bf16", "e4m3"), ("fp16", "e4m3"), ("bf16", "e5m2")])
def test_long_requests(name, head_dim, pattern, types):
    import cupy

    q_type, kv_type = types
    case = LONG[name].replace(
        head_dim=head_dim, pattern=pattern, descale=True, q_type=q_type, kv_type=kv_type
    )
    inputs = case.make(cupy)
    assert "over an 8-bit cache" in explain(**inputs.args).kernels
    inputs.check(flash_attn_varlen_func, fa_version=3)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
def test_all_256_bytes_as_values(kind, cache):
    """One key: out is its value, exactly; NaN stays NaN, and an infinity is one."""
    import cupy

    every = np.arange(256, dtype=np.uint8).reshape(2, 1, 128)
    name = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[cache]
    right = every.view(getattr(ml_dtypes, name)).astype(np.float32)
    q = cupy.asarray(np.zeros((80, 1, 128), np.float16)).astype(kind)
    starts = cupy.asarray([0, 40, 80], np.int32), cupy.asarray([0, 1, 2], np.int32)
    k, v = cupy.zeros((2, 1, 128), np.uint8), cupy.asarray(every)
    out = flash_attn_varlen_func(
        q, k, v, 40, starts[0], 1, starts[1], fp8_dtype=cache, fa_version=3
    )
    np.testing.assert_array_equal(out.get().astype(np.float32), np.repeat(right, 40, axis=0))


@settings(max_examples=100)
@given(case=widen_cases(most_requests=6), num_splits=st.sampled_from([0, 0, 1, 3, 7]))
@pytest.mark.parametrize("share", range(12))
def test_any_case(case, num_splits, share):
    import cupy

    check_repeats(case.make(cupy), flash_attn_varlen_func, num_splits=num_splits, fa_version=3)


def test_repeats_are_equal_bit_for_bit():
    check_many_repeats(1000, q_type="bf16", kv_type="e4m3")
