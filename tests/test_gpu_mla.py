"""Multi-head latent attention on a GPU: random cases, long sequences."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from repeats import check_repeats
from test_emul_mla import OPTIONS
from test_mla import CASE, LATENT

from cupyflash.attention import flash_attn_varlen_func

pytestmark = pytest.mark.gpu


EXAMPLES = int(os.environ.get("CUPYFLASH_GPU_EXAMPLES", "600"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cache", ["", "e4m3"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@settings(max_examples=EXAMPLES // 8)
@given(case=LATENT, **OPTIONS)
def test_any_case(kind, cache, causal, case, num_splits, batch_invariant):
    import cupy

    case = case.replace(q_type=kind, kv_type=cache or kind, descale=bool(cache), causal=causal)
    options = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    check_repeats(case.make(cupy), flash_attn_varlen_func, **options)


@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_long_sequences(heads, q_len, cache):
    import cupy

    lengths = tuple((q_len, n) for n in (4096, 1, 2047, 8191, 63, 64))
    case = CASE.replace(lengths=lengths, group_size=heads, page_size=64, kv_type=cache)
    case.make(cupy).check(flash_attn_varlen_func)
