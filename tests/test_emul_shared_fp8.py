"""Shared prefixes in 8-bit caches on the emulator: widened between their copy and the product."""

from __future__ import annotations

import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from prefixes import SHARED, fp8_cases, make_shared, once, through

KERNEL = "attention_shared_sm90_fp16_e"
FP8 = SHARED.replace(kv_type="e4m3", descale=True)
ALL, LEVELS = [([0, 1, 2, 3], 64)], [([0, 1, 2, 3], 64), ([0, 2], 128), ([2, 0], 160)]


def check(case, groups, device, **more):
    inputs, tree = make_shared(case, groups)
    inputs.check(once(tree, **more))
    assert through(KERNEL, device), [r.symbol for r in device.reports]


@given(
    drawn=fp8_cases(), order=st.integers(0, 9), num_sms=st.sampled_from([3, 1, 2, 5]),
    most=st.sampled_from([0, 0, 2, 5]),
)  # fmt: skip
def test_any_tree_is_attention(drawn, order, num_sms, most):
    """Descales of requests that share keys differ: they belong to rows."""
    with emulated("sm_90", num_sms=num_sms, seed=order) as device:
        check(*drawn, device, num_splits=most)


@pytest.mark.parametrize("kv_type", ["e4m3", "e5m2"])
@pytest.mark.parametrize("q_type", ["bf16", "fp16", "e4m3", "e5m2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_types_of_queries_and_caches(q_type, kv_type, head_dim):
    case = FP8.replace(q_type=q_type, kv_type=kv_type, head_dim=head_dim)
    with emulated("sm_90", num_sms=2, seed=1) as device:
        check(case, LEVELS, device)
