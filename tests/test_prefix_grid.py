"""The grid of shared prefixes, and what is made of its times; no GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cupyflash.bench.kernels import needed_kernels
from cupyflash.bench.prefix_grid import GRID, GRID_8_BIT, grid_cases
from cupyflash.bench.prefix_table import fit, losses, main
from cupyflash.cascade_policy import _COSTS, _COSTS_8_BIT, predict_microseconds
from cupyflash.cli.call_options import gpu_of

KINDS = {"bf16": GRID, "e4m3": GRID_8_BIT}


def _row(kind, point, **slower):
    requests, shared, own = point
    width = {"bf16": 2, "e4m3": 1}[kind]
    found = {}
    for way, scheduled in (("ahead", True), ("inside", False)):
        found["plain"], found[way] = predict_microseconds(
            shared, [1] * requests, [shared + own] * requests, 32, 8, 128,
            scheduled=scheduled, cache_itemsize=width,
        )  # fmt: skip
    us = {way: seconds * slower.get(way, 1) for way, seconds in found.items()}
    row = {"cache": kind, "requests": requests, "shared": shared, "own": own}
    return {**row, "us": us, "differ": 0.001}


@pytest.mark.parametrize(("kind", "costs"), [("bf16", _COSTS), ("e4m3", _COSTS_8_BIT)])
def test_a_fit_finds_the_numbers_that_times_were_made_of(kind, costs):
    found = fit([_row(kind, point) for point in KINDS[kind]])
    assert found == pytest.approx(costs._asdict(), rel=1e-6)


def test_a_decision_that_is_slower_is_named():
    point = (64, 8192, 1024)
    assert losses([_row("bf16", point)]) == []
    lost = losses([_row("bf16", point, ahead=4.0)])
    assert [(row["requests"], way) for row, way, _ in lost] == [(64, "ahead")]
    assert losses([_row("bf16", (8, 128, 16), ahead=4.0)]) == []  # it is left to plain decode


@pytest.mark.parametrize("kind", KINDS)
def test_grids_reach_as_far_as_they_say(kind):
    assert len(set(KINDS[kind])) == len(KINDS[kind])
    requests, shared, own = zip(*KINDS[kind], strict=True)
    assert (max(requests), max(shared), max(own)) == (512, 32768, 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_a_point_is_timed_three_ways(kind):
    cases = grid_cases((8, 2048, 512), kind)
    plain = replace(cases["plain"], prefix_levels=())
    symbols = [
        {variant.symbol for variant in needed_kernels([case], gpu_of("h200"))}
        for case in (plain, cases["ahead"], cases["inside"])
    ]
    decode, ahead, inside = symbols
    assert all("decode" in symbol for symbol in decode)
    assert "schedule_shared" in ahead
    assert len(inside) == 1
    assert not inside & ahead


def test_tables_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = [_row(kind, point) for kind, grid in KINDS.items() for point in grid[:4]]
    (tmp_path / "grid.json").write_text(json.dumps(rows))
    main([str(tmp_path / "grid.json"), "--plot", str(tmp_path / "grid.png")])
    printed = capsys.readouterr().out
    assert printed.count("| alone, ") + printed.count("| shared, ") == 2 * len(rows)
    assert (tmp_path / "grid.png").stat().st_size > 1000
