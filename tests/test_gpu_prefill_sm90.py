"""The Hopper prefill kernel on a GPU: random cases, repeats, long requests."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emul_attention import bits
from test_emul_prefill_sm90 import prefill_cases
from test_emul_prefill_sm90_shift import built

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.fa_version import is_fa_version_supported
from cupyflash.testing import Case

pytestmark = pytest.mark.gpu
EXAMPLES = int(os.environ.get("CUPYFLASH_GPU_EXAMPLES", "200"))


@pytest.fixture(autouse=True)
def _hopper():
    if not is_fa_version_supported(3):
        pytest.skip("version 3 needs compute capability 9.0")


@settings(max_examples=EXAMPLES)
@given(case=prefill_cases(most_requests=6), num_splits=st.sampled_from([0, 0, 1, 3, 7]))
@pytest.mark.parametrize("share", range(12))
def test_any_case(case, num_splits, share):
    import cupy

    inputs = case.make(cupy)
    options = {"num_splits": num_splits, "fa_version": 3}
    first = inputs.call(flash_attn_varlen_func, **options)
    inputs.expected().check(*first)
    assert bits(inputs.call(flash_attn_varlen_func, **options)) == bits(first)


LONG = {
    "causal": Case(lengths=((1100, 900),), num_heads_kv=1, group_size=2, causal=True),
    "ragged": Case(lengths=tuple((n, n // 3) for n in (900, 17, 128, 0, 500, 129, 3, 64))),
    "window": Case(lengths=((1500, 0),), window_size=(300, 0), page_size=16),
    "chunk": Case(lengths=((256, 3000), (130, 2000)), group_size=4, causal=True, page_size=16),
}


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LONG)
def test_long_requests(name, kind, head_dims):
    """Hopper against the oracle, and no further from the portable kernel than both may be."""
    import cupy

    case = LONG[name].replace(
        head_dim=head_dims[0], head_dim_v=head_dims[1], q_type=kind, kv_type=kind
    )
    inputs = case.make(cupy)
    for version in (2, 3):
        inputs.expected().check(*inputs.call(flash_attn_varlen_func, fa_version=version))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("pattern", ["jump", "climb", "edge", "wild", "values"])
def test_scores_that_outgrow_the_shift(pattern, kind):
    import cupy

    built(pattern, kind, xp=cupy).check(flash_attn_varlen_func, num_splits=1, fa_version=3)


def test_repeats_are_equal_bit_for_bit():
    import cupy

    case = Case(lengths=((700, 300), (129, 0), (17, 2000)), num_heads_kv=2, group_size=4,
                causal=True, head_dim=128, q_type="bf16", kv_type="bf16", page_size=16)  # fmt: skip
    inputs = case.make(cupy)
    first = bits(inputs.call(flash_attn_varlen_func, fa_version=3))
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    right_out, right_lse = out.copy(), lse.copy()
    differs = cupy.zeros((), cupy.bool_)
    for _ in range(10_000):
        flash_attn_varlen_func(**inputs.args, out=out, lse=lse, fa_version=3)
        differs |= (out.view(cupy.uint16) != right_out.view(cupy.uint16)).any()
        differs |= (lse.view(cupy.uint32) != right_lse.view(cupy.uint32)).any()
    assert not bool(differs)
    assert bits(inputs.call(flash_attn_varlen_func, fa_version=3)) == first
