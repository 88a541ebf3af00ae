"""The merge kernel on the emulator: shapes, aliases, orders, and what it reads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.merge import merge_attn_states
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.dtypes import BF16, FP32
from cupyflash.runtime.merge_plan import make_merge_plan
from cupyflash.testing import DTYPES, expect_merge

ARCH = "sm_80"


def state(rng, tokens, heads, dim, kind="bf16", align=256):
    """A state in memory of its own, between red zones."""
    out = device_array((tokens, heads, dim), DTYPES[kind], align=256)
    lse = device_array((heads, tokens), np.float32)
    if align != 256:
        raw = device_array(out.nbytes + align, np.uint8)
        out = raw[align:].view(out.dtype).reshape(out.shape)
    out[...] = rng.standard_normal(out.shape).astype(out.dtype)
    lse[...] = rng.uniform(-20, 20, lse.shape)
    lse[rng.random(lse.shape) < 0.2] = rng.choice([-np.inf, np.inf])
    out[np.isinf(lse.T)] = np.nan
    return out, lse


def merge(prefix, suffix, seed=0, arch=ARCH, **options):
    out, lse = device_array(prefix[0].shape, prefix[0].dtype), device_array(prefix[1].shape, "f4")
    with emulated(arch, seed=seed) as device:
        merge_attn_states(out, *prefix, *suffix, lse, **options)
    return out, lse, device


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@given(
    tokens=st.integers(1, 70), heads=st.sampled_from([1, 2, 5, 33, 300]),
    dim=st.sampled_from([1, 3, 8, 24, 100, 512]), kind=st.sampled_from(["fp32", "fp16", "bf16"]),
    align=st.sampled_from([256, 2, 4, 8]), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_shape_in_any_order(arch, tokens, heads, dim, kind, align, seed):
    tokens = min(tokens, max(1, 12000 // (heads * dim)))
    align = max(align, DTYPES[kind].itemsize)
    rng = np.random.default_rng(seed)
    prefix, suffix = (state(rng, tokens, heads, dim, kind, align) for _ in range(2))
    out, lse, _ = merge(prefix, suffix, seed, arch)
    expect_merge(prefix, suffix, out_dtype=kind).check(out, lse)
    again = merge(prefix, suffix, seed + 1, arch)
    assert again[0].tobytes() == out.tobytes()
    assert again[1].tobytes() == lse.tobytes()


@given(tokens=st.integers(1, 9000), heads=st.integers(1, 300), dim=st.integers(1, 1100))
def test_a_plan_covers_every_row_with_a_legal_block(tokens, heads, dim):
    for kind, vectorised in ((BF16, dim % 8 == 0), (FP32, False)):
        plan = make_merge_plan("sm_80", kind, kind, tokens, heads, dim, vectorised)
        x, y, z = plan.block
        assert x * y * z <= 256
        assert z <= 64
        assert plan.grid[0] * z * 4 >= tokens > (plan.grid[0] - 1) * z * 4
        assert plan.grid[1] * y >= heads > (plan.grid[1] - 1) * y
        assert plan.grid[1] <= 65535


def test_wide_and_narrow_accesses_give_the_same_bits():
    rng = np.random.default_rng(1)
    prefix, suffix = (state(rng, 21, 3, 64) for _ in range(2))
    out, lse, _ = merge(prefix, suffix)
    odd = device_array(prefix[0].nbytes + 2)[2:].view(prefix[0].dtype).reshape(prefix[0].shape)
    odd[...] = prefix[0]
    narrow_out, narrow_lse, _ = merge((odd, prefix[1]), suffix)
    assert narrow_out.tobytes() == out.tobytes()
    assert narrow_lse.tobytes() == lse.tobytes()


def read_of(device, array):
    """Bytes that the last launch read of an argument, by its place among them."""
    return device.reports[-1].bytes_read[array]


def test_each_input_is_read_once():
    rng = np.random.default_rng(2)
    prefix, suffix = (state(rng, 40, 8, 128) for _ in range(2))
    for _, lse in (prefix, suffix):
        lse[np.isinf(lse)] = 1
    _, _, device = merge(prefix, suffix)
    order = (1, prefix[0]), (2, prefix[1]), (3, suffix[0]), (4, suffix[1])
    assert [read_of(device, i) for i, _ in order] == [a.nbytes for _, a in order]


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_an_empty_side_is_not_read(empty):
    rng = np.random.default_rng(3)
    prefix, suffix = (state(rng, 40, 8, 128) for _ in range(2))
    prefix[1][...] = empty
    _, _, device = merge(prefix, suffix)
    assert read_of(device, 1) == 0


def test_tokens_without_a_prefix_read_none():
    rng = np.random.default_rng(4)
    prefix, suffix = (state(rng, 40, 8, 128) for _ in range(2))
    _, _, device = merge(prefix, suffix, prefill_tokens_with_context=0)
    assert read_of(device, 1) == read_of(device, 2) == 0


def test_subnormal_values_are_kept():
    lse = np.zeros((1, 2), np.float32)
    tiny = np.array([[[1e-40] * 4], [[-3e-42] * 4]], np.float32)
    out, _, _ = merge((tiny, lse), (tiny, lse))
    np.testing.assert_allclose(out, tiny, rtol=0, atol=2e-45)
    assert (out != 0).all()


def test_interleaved_arrays_do_not_overlap():
    rng = np.random.default_rng(5)
    prefix, suffix = (state(rng, 11, 3, 16) for _ in range(2))
    right, right_lse, _ = merge(prefix, suffix)
    both = device_array((11, 3, 32), prefix[0].dtype)
    lses = device_array((3, 22), np.float32)
    both[..., 16:], lses[:, 1::2] = prefix[0], prefix[1]
    with emulated(ARCH):
        merge_attn_states(both[..., :16], both[..., 16:], lses[:, 1::2], *suffix, lses[:, ::2])
    assert both[..., :16].tobytes() == right.tobytes()
    assert lses[:, ::2].tobytes() == right_lse.tobytes()


@pytest.mark.parametrize("what", ["a token later", "other strides", "fewer bytes", "lse"])
def test_an_output_over_part_of_an_input_is_refused(what):
    rng = np.random.default_rng(6)
    prefix, suffix = (state(rng, 8, 8, 64, "fp16") for _ in range(2))
    buffer = device_array((9, 8, 64), np.float16, fill=1)
    lses = device_array((8, 9), np.float32, fill=1)
    out, lse = device_array((8, 8, 64), np.float16, fill=1), device_array((8, 8), "f4", fill=1)
    options = {}
    if what == "a token later":
        prefix, out = (buffer[:-1], prefix[1]), buffer[1:]
    elif what == "other strides":
        prefix, out = (buffer[:-1], prefix[1]), buffer[:-1].transpose(1, 0, 2)
    elif what == "fewer bytes":
        prefix, options = (buffer[:-1], prefix[1]), {"output_scale": 1.0}
        out = buffer[:-1].reshape(-1)[:2048].view(np.uint8).reshape(8, 8, 64)
    else:
        prefix, lse = (prefix[0], lses[:, :-1]), lses[:, 1:]
    name = r"output_lse overlaps prefix_lse" if what == "lse" else r"output overlaps prefix_output"
    with emulated(ARCH) as device, pytest.raises(ValueError, match=name):
        merge_attn_states(out, *prefix, *suffix, lse, **options)
    assert device.launches == 0
    assert (buffer == 1).all()
    assert (lses == 1).all()


def test_the_emulated_device_says_what_a_plan_may_know():
    with emulated("sm_90") as device:
        assert isinstance(device.info, DeviceInfo)
        assert device.info.capability == (9, 0)


def test_an_output_in_e4m3_by_arithmetic_and_by_instruction():
    rng = np.random.default_rng(7)
    prefix, suffix = (state(rng, 30, 4, 64, "fp32") for _ in range(2))
    found = []
    for arch in ("sm_80", "sm_90"):
        out = device_array((30, 4, 64), ml_dtypes.float8_e4m3fn)
        with emulated(arch):
            merge_attn_states(out, *prefix, *suffix, output_scale=np.array([0.01], np.float32))
        found.append(out.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_sinks_of_any_type(kind):
    rng = np.random.default_rng(8)
    prefix, suffix = (state(rng, 9, 5, 8, "fp32") for _ in range(2))
    sinks = device_array(5, DTYPES[kind])
    sinks[...] = (rng.standard_normal(5) * 10).astype(sinks.dtype)
    out, lse, _ = merge(prefix, suffix, s_aux=sinks)
    expect_merge(prefix, suffix, out_dtype="fp32", s_aux=sinks).check(out, lse)


@pytest.mark.parametrize("where", ["start", "token stride", "head stride"])
def test_outputs_that_are_not_aligned(where):
    rng = np.random.default_rng(9)
    prefix, suffix = (state(rng, 9, 5, 64) for _ in range(2))
    right, right_lse, _ = merge(prefix, suffix)
    if where == "start":
        out = device_array(right.nbytes + 8)[8:].view(right.dtype).reshape(right.shape)
    elif where == "token stride":
        out = device_array((9, 5 * 64 + 4), right.dtype)[:, : 5 * 64].reshape(9, 5, 64)
        assert out.base is not None
    else:
        out = device_array((9, 5, 68), right.dtype)[..., :64]
    lse = device_array(right_lse.shape, np.float32)
    with emulated(ARCH):
        merge_attn_states(out, *prefix, *suffix, lse)
    assert out.tobytes() == right.tobytes()


def test_an_output_that_runs_backwards_over_an_input_is_refused():
    rng = np.random.default_rng(10)
    buffer = device_array((8, 2, 64), np.float16, fill=1)
    prefix, suffix = (state(rng, 4, 2, 64, "fp16") for _ in range(2))
    with emulated(ARCH), pytest.raises(ValueError, match="output overlaps prefix_output"):
        merge_attn_states(buffer[5:1:-1], buffer[:4], prefix[1], *suffix)
    assert (buffer == 1).all()
