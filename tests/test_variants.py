"""What `precompile` makes is all that calls need."""

from __future__ import annotations

from itertools import product

import pytest

from cupyflash.bounds import AttentionBounds
from cupyflash.families import FAMILIES
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.shared_plan import shared_plans
from cupyflash.runtime.variants import all_variants, every_variant

H200 = DeviceInfo("H200", 0, (9, 0), 132, 227 << 10)
TYPES = [
    (q, kv) for q, kv in product(("bf16", "fp16", "e4m3", "e5m2"), repeat=2)
    if q == kv or kv.startswith("e")
]  # fmt: skip


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_what_a_call_needs_is_among_them(types, rows, causal):
    """`CUPYFLASH_NO_COMPILE` allows no other."""
    known = set(every_variant("sm_90"))
    sizes = (64, 96, 128, 192, 256), (0.0, 5.0), (4, 700)
    for head_dim, softcap, batch in product(*sizes):
        problem = AttentionBounds(
            batch_size=batch, max_seqlen_q=rows, max_seqlen_k=4096, num_heads_q=8, num_heads_kv=2,
            headdim=head_dim, dtype=types[0], kv_dtype=types[1], page_size=16, max_blocks=256,
            causal=causal, softcap=softcap,
        ).problem()  # fmt: skip
        plans = [plan for family in FAMILIES.values() for plan in family.plans(problem, H200)]
        shared = [plan for levels in (1, 3) for plan in shared_plans(problem, H200, levels)]
        assert {plan.variant for plan in plans + shared} <= known


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_none_is_there_twice(arch):
    variants = every_variant(arch)
    assert len({v.symbol for v in variants}) == len(set(variants)) == len(variants)
    assert set(all_variants(arch)) <= set(variants)
