"""``quantize_fp8``: docs/contracts.md, on the CPU, the emulator and a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import flash_attn_varlen_func, quantize_fp8, reshape_and_cache_flash
from cupyflash.testing import DTYPES, LAYOUTS, Case, expect_attention, place
from cupyflash.testing.rounding import saturate

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
GRANULARITIES = {"tensor": lambda heads: 1, "head": lambda heads: heads, "group": lambda heads: 2}


def scales_of(x, groups, kind):
    """By the definition, in float32."""
    size = np.abs(x.astype(np.float32))
    size = np.where(np.isfinite(size), size, 0)
    size = size.reshape(len(x), groups, x.shape[1] // groups * x.shape[2])
    largest = size.max(axis=(0, 2), initial=0)
    return np.where(largest > 0, largest / np.float32(LARGEST[kind]), 1).astype(np.float32)


def quantized(x, scale, kind):
    each = np.repeat(scale, x.shape[1] // len(scale))[:, None]
    with np.errstate(all="ignore"):
        return saturate(x.astype(np.float32) / each, DTYPES[kind]).view(np.uint8)


def draw(tokens, heads, dim, source, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, heads, dim)).astype(np.float32) * 10.0 ** rng.integers(-3, 4)
    if seed % 3 == 0 and x.size:
        x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -np.inf]
    if seed % 5 == 0:
        x[:, :1] = 0
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[source])


@given(
    tokens=st.sampled_from([0, 1, 3, 40, 300]), heads=st.sampled_from([2, 4, 10]),
    dim=st.sampled_from([128, 64, 8, 36]), source=st.sampled_from(["bf16", "fp16", "fp32"]),
    kind=st.sampled_from(["e4m3", "e5m2"]), granularity=st.sampled_from(list(GRANULARITIES)),
    layout=st.sampled_from(LAYOUTS), static=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_any_array(write_path, tokens, heads, dim, source, kind, granularity, layout, static, seed):
    x, groups = draw(tokens, heads, dim, source, seed), GRANULARITIES[granularity](heads)
    xp = write_path.xp
    given_x = place(x, layout, xp=xp)
    out = place(np.full(x.shape, 0xAB, np.uint8), layout, xp=xp, pad=1)
    right = scales_of(x, groups, kind)
    options = {"num_heads_kv": 2} if granularity == "group" else {}
    if static:
        right = np.random.default_rng(seed).uniform(0.01, 2, groups).astype(np.float32)
        options["scale"] = write_path.array(right)
    bits, scale = quantize_fp8(given_x.view, granularity, fp8_dtype=kind, out=out.view, **options)
    np.testing.assert_array_equal(write_path.host(scale), right)
    np.testing.assert_array_equal(write_path.host(bits), quantized(x, right, kind))
    given_x.assert_padding_intact()
    out.assert_padding_intact()


def test_the_same_bytes_as_a_cache_write(write_path):
    rng = np.random.default_rng(0)
    key = rng.standard_normal((32, 2, 64)).astype(ml_dtypes.bfloat16)
    cache = write_path.array(np.zeros((2, 2, 16, 2, 64), np.uint8))
    new, slots = write_path.array(key), write_path.array(np.arange(32))
    bits, scale = quantize_fp8(new, "head")
    reshape_and_cache_flash(new, new, cache[0], cache[1], slots, "fp8", scale, scale)
    np.testing.assert_array_equal(
        write_path.host(cache)[0].reshape(32, 2, 64), write_path.host(bits)
    )


def hadamard(size):
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(size)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("source", ["bf16", "fp32"])
def test_rotated_rows(write_path, source, dim):
    x = draw(50, 4, dim, source, 1)
    bits, scale = quantize_fp8(write_path.array(x), "head", hadamard=True)
    bits, scale = write_path.host(bits), write_path.host(scale)
    np.testing.assert_array_equal(bits, quantize_fp8(x, "head", hadamard=True)[0])
    assert np.abs(bits & 0x7F).max(axis=(0, 2)).tolist() == [0x7E] * 4  # 448
    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale[:, None]
    ones = np.eye(dim, dtype=np.float32).reshape(dim, 1, dim)
    rotation = quantize_fp8(ones, hadamard=True)[0][:, 0]
    signs = np.sign(rotation.view(ml_dtypes.float8_e4m3fn).astype(np.float64)) / np.sqrt(dim)
    np.testing.assert_allclose(np.abs(signs @ hadamard(dim)), np.eye(dim), atol=1e-12)
    right = x.astype(np.float64) @ signs
    np.testing.assert_allclose(values, right, rtol=0.07, atol=float(scale.max()) / 500)


def test_rotation_leaves_products_and_spreads_outliers():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 64, 1, 128)).astype(np.float32)
    q[..., 3] *= 60
    k[..., 3] *= 60
    right = q[:, 0].astype(np.float64) @ k[:, 0].T

    def error(rotate):
        (q8, a), (k8, b) = (quantize_fp8(x, hadamard=rotate) for x in (q, k))
        q8, k8 = (x[:, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float64) for x in (q8, k8))
        return np.abs(q8 @ k8.T * a * b - right).mean()

    assert error(True) < error(False)


def test_a_number_as_scale(write_path):
    x = write_path.array(np.float16([[[1, 1000, -3, 0.001] * 2]]))
    bits, scale = quantize_fp8(x, scale=0.5)
    values = write_path.host(bits).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(values[0, 0, :4], [2, 448, -6, 0.001953125])
    assert write_path.host(scale).tolist() == [0.5]


def test_what_is_quantised_attends_as_its_values_do():
    """Scales come back as descales: attention on 8 bits is that on what they stand for."""
    case = Case(lengths=((40, 20), (9, 0)), num_heads_kv=2, group_size=3, causal=True)
    arrays = case.make().args
    q, q_scale = quantize_fp8(arrays["q"][:49], "group", num_heads_kv=2)
    k, k_scale = quantize_fp8(arrays["k"][:69], "head")
    v, v_scale = quantize_fp8(arrays["v"][:69])
    descales = {f"{name}_descale": np.broadcast_to(scale, (2, 2))
                for name, scale in (("q", q_scale), ("k", k_scale), ("v", v_scale))}  # fmt: skip
    same = {name: arrays[name] for name in ("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k",
                                            "cu_seqlens_k", "causal")}  # fmt: skip
    found = flash_attn_varlen_func(q, k, v, **same, **descales)
    values = [x.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (q, k, v)]
    values[0] *= np.repeat(q_scale, 3)[:, None]
    values[1] *= k_scale[:, None]
    values[2] *= v_scale
    expect_attention(*values, **same, out_dtype=found.dtype).check(found)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"granularity": "token"}, ValueError, "'tensor', 'head', 'group'"),
        ({"granularity": "group"}, ValueError, "num_heads_kv=None must divide the 4 heads"),
        ({"granularity": "group", "num_heads_kv": 3}, ValueError, "num_heads_kv=3 must divide"),
        ({"num_heads_kv": 2}, ValueError, "drop it"),
        ({"scale": 0.0}, ValueError, "must be positive"),
        ({"scale": np.ones(3, np.float32)}, ValueError, "must be [1], [1] or a number"),
        ({"scale": np.ones(1)}, TypeError, "scale is float64"),
        ({"fp8_dtype": "int8"}, ValueError, "not an fp8 format"),
        ({"out": np.zeros((3, 4, 8), np.int8)}, TypeError, "out is int8"),
        ({"out": np.zeros((2, 4, 8), np.uint8)}, ValueError, "must be [3, 4, 8]"),
        ({"stream": 0}, ValueError, "stream given"),
        ({"hadamard": True}, ValueError, "head_dim=8; it is for 64, 128, 256"),
    ],
)
def test_refusals_write_nothing(options, error, text):
    out = options.get("out", np.full((3, 4, 8), 0xAB, np.uint8))
    before = out.copy()
    with pytest.raises(error) as raised:
        quantize_fp8(np.ones((3, 4, 8), np.float32), **{"out": out, **options})
    assert text in str(raised.value)
    np.testing.assert_array_equal(out, before)


def test_8_bit_input_is_refused():
    with pytest.raises(TypeError, match="x is uint8"):
        quantize_fp8(np.zeros((1, 1, 8), np.uint8))
