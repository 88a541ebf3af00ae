"""Multi-head latent attention on a GPU: random cases, long sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emul_mla import OPTIONS
from test_mla import CASE, LATENT

from cupyflash.attention import flash_attn_varlen_func

pytestmark = pytest.mark.gpu


def bits(results):
    return [array.tobytes() for array in results]


@settings(max_examples=500)
@given(case=LATENT, kind=st.sampled_from(["bf16", "fp16"]), **OPTIONS)
def test_any_case(case, kind, num_splits, batch_invariant):
    import cupy

    inputs = case.replace(q_type=kind, kv_type=kind).make(cupy)
    options = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    first = inputs.call(flash_attn_varlen_func, **options)
    inputs.expected().check(*first)
    assert bits(inputs.call(flash_attn_varlen_func, **options)) == bits(first)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_long_sequences(heads, q_len):
    import cupy

    lengths = tuple((q_len, n) for n in (4096, 1, 2047, 8191, 63, 64))
    CASE.replace(lengths=lengths, group_size=heads, page_size=64).make(cupy).check(
        flash_attn_varlen_func
    )
