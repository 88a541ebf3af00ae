"""Shared prefixes in 8-bit caches on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import SHARED, fp8_cases, make_shared, once
from repeats import check_repeats

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
FP8 = SHARED.replace(kv_type="e4m3", descale=True)


@pytest.mark.parametrize("kv_type", ["e4m3", "e5m2"])
@pytest.mark.parametrize("q_type", ["bf16", "e4m3", "fp16"])
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize(("requests", "prefix"), [(3, 4096), (70, 1008), (300, 208)])
def test_many_requests(head_dim, requests, prefix, q_type, kv_type):
    import cupy

    rng = np.random.default_rng(requests)
    lengths = tuple((1, prefix + int(n)) for n in rng.integers(0, 40, requests))
    changes = {"head_dim": head_dim, "num_heads_kv": 1, "q_type": q_type, "kv_type": kv_type}
    case = FP8.replace(lengths=lengths, **changes)
    everyone = list(range(requests))
    inputs, tree = make_shared(case, [(everyone, prefix)], cupy)
    check_repeats(inputs, once(tree))


@pytest.mark.parametrize("pattern", ["spiky", "outlier", "one_hot"])
@pytest.mark.parametrize("q_type", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("requests", [8, 40])
def test_scores_far_apart(requests, head_dim, q_type, pattern):
    """Sums are rescaled many times; warpgroups in turns, and together."""
    import cupy

    changes = {"head_dim": head_dim, "q_type": q_type, "pattern": pattern}
    case = FP8.replace(lengths=((1, 2100),) * requests, num_heads_kv=1, **changes)
    inputs, tree = make_shared(case, [(list(range(requests)), 2048)], cupy)
    check_repeats(inputs, once(tree))


@settings(max_examples=100)
@given(drawn=fp8_cases(most_requests=40), most=st.sampled_from([0, 0, 2, 5]))
@pytest.mark.parametrize("share", range(10))
def test_any_tree_is_attention(drawn, most, share):
    import cupy

    inputs, tree = make_shared(*drawn, cupy)
    check_repeats(inputs, once(tree, num_splits=most))
