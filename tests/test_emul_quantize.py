"""Quantisation on the emulator in any order of warps; what it must return: test_quantize.py."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import given
from hypothesis import strategies as st
from test_quantize import GRANULARITIES, draw, quantized, scales_of

from cupyflash import quantize_fp8
from cupyflash.testing import LAYOUTS, place


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@given(
    tokens=st.one_of(st.integers(0, 9), st.sampled_from([40, 65, 200])),
    heads=st.sampled_from([2, 4, 10]), dim=st.sampled_from([128, 64, 256, 8, 36]),
    source=st.sampled_from(["bf16", "fp16", "fp32"]), kind=st.sampled_from(["e4m3", "e5m2"]),
    granularity=st.sampled_from(list(GRANULARITIES)), layout=st.sampled_from(LAYOUTS),
    given_scale=st.booleans(), num_sms=st.sampled_from([4, 1, 20]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_array_in_any_order(
    arch, tokens, heads, dim, source, kind, granularity, layout, given_scale, num_sms, seed
):
    x, groups = draw(tokens, heads, dim, source, seed), GRANULARITIES[granularity](heads)
    right, options = scales_of(x, groups, kind), {"fp8_dtype": kind}
    if granularity == "group":
        options["num_heads_kv"] = 2
    if given_scale:
        right = np.random.default_rng(seed).uniform(0.01, 2, groups).astype(np.float32)
        options["scale"] = device_array(groups, np.float32, right)
    given_x, out = place(x, layout), place(np.full(x.shape, 0xAB, np.uint8), layout, pad=1)
    with emulated(arch, num_sms=num_sms, seed=seed):
        bits, scale = quantize_fp8(given_x.view, granularity, out=out.view, **options)
    np.testing.assert_array_equal(scale, right)
    np.testing.assert_array_equal(bits, quantized(x, right, kind))
    given_x.assert_padding_intact()
    out.assert_padding_intact()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@given(
    tokens=st.integers(1, 20), heads=st.sampled_from([1, 4, 6]),
    source=st.sampled_from(["bf16", "fp32"]), dim=st.sampled_from([64, 128, 256]),
    granularity=st.sampled_from(["tensor", "head"]),
    layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_rotated_rows_in_any_order(arch, tokens, heads, source, dim, granularity, layout, seed):
    x = place(draw(tokens, heads, dim, source, seed), layout).view
    right = quantize_fp8(x, granularity, hadamard=True)
    with emulated(arch, seed=seed):
        found = quantize_fp8(x, granularity, hadamard=True)
    for left, expected in zip(found, right, strict=True):
        np.testing.assert_array_equal(left, expected)
