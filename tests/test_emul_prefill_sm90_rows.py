"""The other tiles of a head size: of 192 and 256 rows, and what a warpgroup of them passes over."""

from __future__ import annotations

import pytest
from emulator import emulated
from prefill import TILES
from repeats import bits
from test_emul_prefill_sm90_shift import built

from cupyflash import kept_launches, known_call
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime import call, prefill_tile
from cupyflash.runtime.dtypes import BF16
from cupyflash.runtime.prefill_plan import make_prefill_plan
from cupyflash.testing import Case

OTHERS = {
    (tile.variant(BF16, score_mod).symbol): (tile, score_mod)
    for (_, score_mod), found in prefill_tile._OTHERS.items()
    for tile, *_ in found
}


@pytest.fixture(params=OTHERS)
def symbol(request, monkeypatch):
    """The kernel that every call has."""
    tile = OTHERS[request.param][0]
    costs = (1.0, 1.0, 1.0)
    monkeypatch.setattr(prefill_tile, "_choices", lambda problem: ((tile, costs, costs),))
    kept = (call, "_layouts"), (known_call, "_known"), (kept_launches, "_recordings")
    for module, memo in kept:
        monkeypatch.setattr(module, memo, {})
    make_prefill_plan.cache_clear()
    yield request.param
    make_prefill_plan.cache_clear()


def run(inputs, symbol, seed=0, **options):
    with emulated("sm_90a", num_sms=2, seed=seed) as device:
        found = inputs.call(flash_attn_varlen_func, **options)
        inputs.expected().check(*found)
        assert symbol.replace("bf16", "") in [
            report.symbol.replace("bf16", "").replace("fp16", "") for report in device.reports
        ]
        return found


def made(case, symbol, kind="bf16"):
    tile, score_mod = OTHERS[symbol]
    modified = {"softcap": 5.0, "alibi": "head"} if score_mod else {}
    return case.replace(head_dim=tile.head_dim, q_type=kind, kv_type=kind, **modified).make()


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_mask(symbol, kind, name):
    run(made(TILES[name], symbol, kind), symbol)


@pytest.mark.parametrize("group_size", [1, 8, 48, 128])
def test_heads_of_a_group(symbol, group_size):
    case = Case(lengths=((300 // group_size + 17, 40), (3, 0)), num_heads_kv=1,
                group_size=group_size, causal=True)  # fmt: skip
    run(made(case, symbol), symbol)


def test_splits(symbol):
    case = Case(lengths=((40, 900), (30, 64)), group_size=8, page_size=16, sink=True, causal=True)
    run(made(case, symbol), symbol, num_splits=3)


def test_the_order_of_warps_changes_no_bit(symbol):
    inputs = made(Case(lengths=((400, 0), (257, 130)), group_size=2, causal=True), symbol)
    first = bits(run(inputs, symbol))
    assert all(bits(run(inputs, symbol, seed=seed)) == first for seed in range(1, 4))


@pytest.mark.parametrize("pattern", ["jump", "climb", "wild", "values"])
def test_scores_that_outgrow_the_shift(symbol, pattern):
    tile, score_mod = OTHERS[symbol]
    if not score_mod:
        run(built(pattern, "bf16", heads=2, head_dim=tile.head_dim), symbol, num_splits=1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_a_block(symbol, causal, seed):
    """Whole tiles and parts of them, with and without keys that a warpgroup passes over."""
    lengths = ((257, 0), (64, 0), (100, 30), (1, 300), (128, 64), (0, 5), (190, -60), (5, 0))
    case = Case(lengths=lengths, num_heads_kv=3, causal=causal, seed=seed)
    with emulated("sm_90a", num_sms=1 + seed % 2, seed=seed):
        made(case, symbol).check(flash_attn_varlen_func)


@pytest.mark.parametrize("seed", range(6))
def test_a_warpgroup_that_is_a_tile_ahead(symbol, seed):
    """Tiles of so few keys that no buffer of keys holds the first warpgroup back."""
    case = Case(lengths=((17, 0),), num_heads_kv=1, group_size=3, causal=True, page_size=16)
    with emulated("sm_90a", num_sms=1, seed=seed):
        made(case, symbol).check(flash_attn_varlen_func)


def test_what_a_warpgroup_passes_over_is_not_multiplied():
    """The first warpgroup of a causal tile of 128 rows needs the keys before row 64 alone."""
    counts = {}
    for causal in (False, True):
        case = Case(lengths=((128, 0),), num_heads_kv=1, head_dim=256, causal=causal,
                    q_type="bf16", kv_type="bf16")  # fmt: skip
        with emulated("sm_90a", num_sms=1) as device:
            case.make().check(flash_attn_varlen_func)
            counts[causal] = device.reports[-1].mma_count
    assert counts[True] * 4 == counts[False] * 3
