"""What shared prefixes are refused for by their sizes."""

from __future__ import annotations

import pytest

from cupyflash.bounds import AttentionBounds
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.shared_plan import make_shared_plan, shared_plans, shared_refusal

H200 = DeviceInfo("H200", 0, (9, 0), 132, 227 << 10)


def problem(batch, most_keys, heads=8):
    return AttentionBounds(
        batch_size=batch, max_seqlen_q=1, max_seqlen_k=most_keys, num_heads_q=heads,
        num_heads_kv=heads, headdim=128, page_size=16, max_blocks=most_keys // 16, causal=True,
    ).problem()  # fmt: skip


def test_own_keys_of_all_requests_are_counted_in_32_bits():
    """By bounds, as lengths are on the device: the line of tiles would wrap and lose requests."""
    keys = make_shared_plan(problem(1024, 1 << 20), H200).tile.keys
    most = (2**31 // (1024 * 64) - 2) * keys
    assert not shared_refusal(problem(1024, most // 2, 64), H200)
    for too_many in (most, 2 * most):
        assert "tiles of own keys" in shared_refusal(problem(1024, too_many, 64), H200)
        assert not shared_plans(problem(1024, too_many, 64), H200, 1)


@pytest.mark.parametrize(("batch", "keys"), [(1024, 1 << 20), (1, 1 << 30)])
def test_what_is_large_and_fits(batch, keys):
    assert not shared_refusal(problem(batch, keys), H200)
