"""Public reports on fp8; docs/public_reports.md names them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, attend, check, random_batch, run

from cupyflash import flash_attn_varlen_func, reshape_and_cache_flash
from cupyflash.testing import DTYPES, Case, expect_attention

BF16 = np.dtype(ml_dtypes.bfloat16)
CASE = Case(
    lengths=((1, 60), (4, 9)), num_heads_kv=2, group_size=2, page_size=16, causal=True,
    q_type="bf16", kv_type="e4m3",
)  # fmt: skip


@pytest.mark.parametrize("q_type", ["bf16", "e4m3"])
def test_b64_small_weights_are_not_lost_from_the_sum_alone(path, q_type):
    """V = 1 and a peaked softmax over 4096 keys: out stays 1."""
    case = Case(
        lengths=((4, 4092),), page_size=64, q_type=q_type, kv_type="e4m3", pattern="spiky", seed=3
    )
    inputs = case.make(path.xp)
    one = np.float32(1).astype(DTYPES["e4m3"]).view(np.uint8)
    inputs.args["v"] = path.array(np.full(inputs.args["v"].shape, one))
    out = flash_attn_varlen_func(**inputs.args)
    np.testing.assert_allclose(path.host(out)[:4].astype(np.float32), 1, atol=0.02)


@pytest.mark.parametrize("q_type", ["bf16", "e4m3"])
def test_b65_descales_of_each_head(path, q_type):
    inputs = CASE.replace(lengths=((3, 60),), q_type=q_type).make(path.xp)
    scales = {"k_descale": [[0.5, 2]], "v_descale": [[1, 3]]}
    if q_type == "e4m3":
        scales["q_descale"] = [[2, 0.25]]
    inputs.args.update({n: path.array(s, np.float32) for n, s in scales.items()})
    inputs.check(flash_attn_varlen_func)
    dequantised = dict(inputs.args)
    for name in scales:
        del dequantised[name]
    plain, _ = run(path, dequantised)
    scaled, _ = run(path, inputs.args)
    assert not np.array_equal(plain[:3], scaled[:3])


def descales(path):
    full = np.full((2, 2), 1.5, np.float32)
    return {
        "[1]": path.array(full[0, :1]),
        "[batch, heads]": path.array(full),
        "stride 0": path.xp.broadcast_to(path.array(full[0, :1]), (2, 2)),
        "float": 1.5,
        "0-d": np.array(1.5, np.float32),
        "numpy scalar": np.float32(1.5),
    }


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_b67_descales_of_every_shape(path, name):
    inputs = CASE.make(path.xp)
    results = {}
    for shape, scale in descales(path).items():
        inputs.args[name] = scale
        results[shape] = run(path, inputs.args)
    for out, lse in results.values():
        np.testing.assert_array_equal(out, results["[1]"][0])
        np.testing.assert_array_equal(lse, results["[1]"][1])
    inputs.args[name] = path.array(np.full((2, 2), 1.5, np.float32))
    inputs.check(flash_attn_varlen_func)


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_b67_a_descale_of_another_shape_is_refused_with_both(path, name):
    inputs = CASE.make(path.xp)
    inputs.args[name] = path.array(np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match=rf"{name}.*\(1, 2\).*\(2, 2\)"):
        flash_attn_varlen_func(**inputs.args)


@pytest.mark.parametrize("name", ["k_descale", "v_descale", "q_descale"])
def test_b68_missing_descales_are_one(path, name):
    inputs = CASE.replace(q_type="e4m3").make(path.xp)
    scales = {n: path.array(np.ones((2, 2), np.float32)) for n in ("q_descale", "k_descale")}
    scales["v_descale"] = path.array(np.ones((2, 2), np.float32))
    scales[name] = path.array(np.float32([[0.5, 2], [1, 4]]))
    whole = run(path, {**inputs.args, **scales})
    alone = run(path, {**inputs.args, name: scales[name]})
    np.testing.assert_array_equal(alone[0], whole[0])
    inputs.args[name] = scales[name]
    inputs.check(flash_attn_varlen_func)


def test_b70_writes_saturate(write_path):
    values = [448, 464, 465, 1e4, np.inf, -np.inf, np.nan, -448]
    key = write_path.array(np.float32(values).reshape(1, 1, 8))
    for kind, stored in (
        ("fp8_e4m3", [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0xFE]),
        ("fp8_e5m2", [0x5F, 0x5F, 0x5F, 0x71, 0x7B, 0xFB, 0x7F, 0xDF]),
    ):
        caches = [write_path.array(np.zeros((1, 16, 1, 8), np.uint8)) for _ in "kv"]
        slots = write_path.array(np.array([2]))
        reshape_and_cache_flash(key, key, *caches, slots, kind, 1.0, 1.0)
        for cache in caches:
            assert write_path.host(cache)[0, 2, 0].tolist() == stored


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_b71_all_256_bytes_are_read_as_ml_dtypes_reads_them(path, kind):
    """One key: out is its value, exactly, since fp8 fits in bfloat16; NaN stays NaN."""
    q = np.zeros((1, 1, 256), BF16)
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    out, lse = attend(path, q, np.zeros_like(every), every, [1], [1], fp8_dtype=kind)
    right = every.view(DTYPES[kind]).astype(np.float64)
    np.testing.assert_array_equal(out, right)
    assert (lse == 0).all()


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_b71_all_finite_bytes_as_keys(path, kind):
    every = np.arange(256, dtype=np.uint8)
    finite = every[np.isfinite(every.view(DTYPES[kind]).astype(np.float32))]
    k = np.zeros((len(finite), 1, 64), np.uint8)
    k[:, 0, 0] = finite
    q, _, v = random_batch([1], [len(finite)], dtype=BF16)
    q[...] = 0
    q[0, 0, 0] = 2.0**-6
    args = arguments(path, q, k, v.astype(DTYPES[kind]).view(np.uint8), [1], [len(finite)], 16)
    args["fp8_dtype"] = kind
    check(path, args)


def test_b65_the_right_answer_is_attention_on_the_dequantised_cache():
    """The oracle itself: descales folded in by hand give the same."""
    inputs = CASE.replace(descale=True).make()
    args = dict(inputs.args)
    scale_k, scale_v = args.pop("k_descale"), args.pop("v_descale")
    starts, k_len = np.array([0, 1, 5]), args["seqused_k"]
    values = [args[n].view(DTYPES["e4m3"]).astype(np.float64) for n in "kv"]
    for request in range(2):
        own = args["block_table"][request, : -(-k_len[request] // 16)]
        for cache, scale in zip(values, (scale_k, scale_v), strict=True):
            cache[own] *= scale[request][:, None]
    args.update(k=values[0], v=values[1])
    right, found = inputs.expected(), expect_attention(**args)
    rows = slice(0, starts[-1])
    np.testing.assert_allclose(found.out[rows], right.out[rows], rtol=1e-12)
