"""The Hopper prefill kernel on a GPU: random cases, repeats, long requests."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill import LONG, check_many_repeats, prefill_cases
from repeats import check_repeats
from test_emul_prefill_sm90_shift import built

from cupyflash.attention import flash_attn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
EXAMPLES = int(os.environ.get("CUPYFLASH_GPU_EXAMPLES", "200"))


@settings(max_examples=EXAMPLES)
@given(
    case=prefill_cases(most_requests=6),
    num_splits=st.sampled_from([0, 0, 1, 3, 7]),
    invariant=st.booleans(),  # those have tiles of 192 rows at head size 64, whatever the lengths
)
@pytest.mark.parametrize("share", range(12))
def test_any_case(case, num_splits, invariant, share):
    import cupy

    options = {"num_splits": num_splits, "fa_version": 3, "batch_invariant": invariant}
    check_repeats(case.make(cupy), flash_attn_varlen_func, **options)


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
    check_many_repeats(10_000, q_type="bf16", kv_type="bf16")
