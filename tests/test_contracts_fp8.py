"""fp8 in docs/contracts.md, on every path."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyflash import flash_attn_varlen_func
from cupyflash.testing import Case

BF16 = np.dtype(ml_dtypes.bfloat16)
CASE = Case(
    lengths=((1, 37), (5, 20), (0, 9), (3, -1), (1, -1)), num_heads_kv=2, group_size=3,
    page_size=16, causal=True, q_type="bf16", kv_type="bf16",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "names"), [
    ("e4m3", ["e4m3", "fp8", "fp8_e4m3", "float8_e4m3fn", "e4m3fn"]),
    ("e5m2", ["e5m2", "fp8_e5m2", "float8_e5m2"]),
])  # fmt: skip
def test_every_spelling_of_an_fp8_format(path, kind, names):
    inputs = CASE.replace(kv_type=kind, descale=True).make(path.xp)
    inputs.check(flash_attn_varlen_func)
    results = []
    for name in names:
        inputs.args["fp8_dtype"] = name
        results.append(inputs.call(flash_attn_varlen_func))
    for result in results:
        assert result[0].tobytes() == results[0][0].tobytes()


def test_numpy_takes_the_fp8_types_of_ml_dtypes():
    inputs = CASE.replace(kv_type="e5m2", q_type="e4m3").make()
    right = inputs.call(flash_attn_varlen_func)
    inputs.args["q"] = inputs.args["q"].view(ml_dtypes.float8_e4m3fn)
    for name in "kv":
        inputs.args[name] = inputs.args[name].view(ml_dtypes.float8_e5m2)
    del inputs.args["fp8_dtype"], inputs.args["q_fp8_dtype"]
    for left, expected in zip(inputs.call(flash_attn_varlen_func), right, strict=True):
        assert left.tobytes() == expected.tobytes()


def test_an_8_bit_query_gives_bfloat16_unless_out_says_float16(path):
    inputs = CASE.replace(q_type="e4m3", kv_type="e4m3").make(path.xp)
    inputs.check(flash_attn_varlen_func)
    assert flash_attn_varlen_func(**inputs.args).dtype == BF16
    half = path.array(np.full(inputs.args["q"].shape, np.nan, np.float16))
    flash_attn_varlen_func(**inputs.args, out=half)
    inputs.expected(out_dtype="fp16").check(path.host(half))


@pytest.mark.parametrize("kv_type", ["bf16", "e4m3", "e5m2"])
def test_a_bfloat16_query_beyond_the_range_of_float16(path, kv_type):
    inputs = CASE.replace(kv_type=kv_type, softmax_scale=1e-5).make(path.xp)
    q = path.host(inputs.args["q"]).astype(np.float32)
    inputs.args["q"] = path.array(q * 1e5, BF16)
    out, lse = flash_attn_varlen_func(**inputs.args, return_softmax_lse=True)
    inputs.expected(out_dtype="bf16").check(path.host(out), path.host(lse))
