"""Tiles of 192 and 256 rows of the Hopper prefill, and key tiles that a warpgroup passes over."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from prefill import TILES
from test_emul_attention import bits
from test_emul_prefill_sm90_shift import built

from cupyflash import known_call
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime import call, prefill_tile
from cupyflash.runtime.prefill_plan import make_prefill_plan
from cupyflash.testing import Case

ROWS = {192: prefill_tile._WIDE_64, 256: prefill_tile._TALL_64}


@pytest.fixture(params=ROWS)
def rows(request, monkeypatch):
    """Every call of head size 64 has tiles of so many rows."""
    monkeypatch.setattr(prefill_tile, "_tile_64", lambda problem: ROWS[request.param])
    for module, memo in ((call, "_layouts"), (known_call, "_known"), (known_call, "_recordings")):
        monkeypatch.setattr(module, memo, {})
    make_prefill_plan.cache_clear()
    yield request.param
    make_prefill_plan.cache_clear()


def run(inputs, rows, seed=0, **options):
    with emulated("sm_90a", num_sms=2, seed=seed) as device:
        found = inputs.call(flash_attn_varlen_func, **options)
        inputs.expected().check(*found)
        assert any(f"_m{rows}" in report.symbol for report in device.reports)
        return found


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_mask(rows, kind, name):
    run(TILES[name].replace(head_dim=64, q_type=kind, kv_type=kind).make(), rows)


@pytest.mark.parametrize("group_size", [1, 8, 48, 128])
def test_heads_of_a_group(rows, group_size):
    case = Case(lengths=((300 // group_size + 17, 40), (3, 0)), num_heads_kv=1, head_dim=64,
                group_size=group_size, causal=True, q_type="bf16", kv_type="bf16")  # fmt: skip
    run(case.make(), rows)


@pytest.mark.parametrize("pattern", ["jump", "climb", "wild", "values"])
def test_scores_that_outgrow_the_shift(rows, pattern):
    run(built(pattern, "bf16"), rows, num_splits=1)


def test_splits(rows):
    case = Case(lengths=((40, 900), (30, 64)), group_size=8, page_size=16, head_dim=64, sink=True,
                q_type="bf16", kv_type="bf16", causal=True)  # fmt: skip
    run(case.make(), rows, num_splits=3)


def test_the_order_of_warps_changes_no_bit(rows):
    inputs = Case(lengths=((400, 0), (257, 130)), group_size=2, head_dim=64, causal=True,
                  q_type="bf16", kv_type="bf16").make()  # fmt: skip
    first = bits(run(inputs, rows))
    assert all(bits(run(inputs, rows, seed=seed)) == first for seed in range(1, 4))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_what_a_warpgroup_passes_over_is_not_multiplied(head_dim):
    """Of causal tiles as long as they are wide, the first warpgroup needs half the keys."""
    counts = {}
    for causal in (False, True):
        case = Case(lengths=((128, 0),), num_heads_kv=1, head_dim=head_dim, causal=causal,
                    q_type="bf16", kv_type="bf16")  # fmt: skip
        with emulated("sm_90a", num_sms=1) as device:
            case.make().check(flash_attn_varlen_func)
            counts[causal] = device.reports[-1].mma_count
    passed = {64: 0, 256: 1}[head_dim]  # of four pairs of a warpgroup and a key tile
    assert np.isclose(counts[True], counts[False] * (1 - passed / 4))
