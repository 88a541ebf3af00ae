"""Plans of the Hopper prefill: tiles, splits, pages, what is left to the portable kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupyflash.bench.cases import bench_cases
from cupyflash.bench.inputs import DryInputs
from cupyflash.bench.providers import cupyflash
from cupyflash.bounds import AttentionBounds
from cupyflash.runtime.device import DeviceInfo, use_device
from cupyflash.runtime.dry_device import DryDevice, encoded_map
from cupyflash.runtime.prefill_plan import (
    make_prefill_plan,
    prefill_plans,
    prefill_refusal,
    prefill_variants,
)
from cupyflash.runtime.prefill_tile import prefill_tile

H200 = DeviceInfo("H200", 0, (9, 0), 132, 227 << 10)


def problem_of(**changes):
    given = {"batch_size": 2, "max_seqlen_q": 4096, "max_seqlen_k": 4096, "num_heads_q": 32,
             "num_heads_kv": 8, "headdim": 128, "page_size": 16}  # fmt: skip
    return AttentionBounds(**{**given, **changes}).problem()


def plan_of(limit=1 << 28, **changes):
    return make_prefill_plan(problem_of(**changes), H200, limit)


def test_every_variant_fits_the_device():
    for variant in prefill_variants("sm_90"):
        assert dict(variant.defines)["SMEM_NBYTES"] <= H200.smem_optin
    assert not list(prefill_variants("sm_100"))


@pytest.mark.parametrize(
    "name", ["prefill/d256/causal/s512", "prefill-fp8/d128/full/s2048", "paged-prefill/p16/s8192"]
)
def test_maps_have_the_l2_fetch_what_a_box_holds_of_a_row(name):
    """Panels that are neighbours in memory are loaded at once: wider, each fetches both."""
    case = next(case for case in bench_cases(name) if case.name == name)
    device = DryDevice(H200)
    with use_device(device):
        cupyflash(DryInputs(case))()
    maps = [encoded_map(value) for _, values in device.launches for value in values]
    maps = [numbers for numbers in maps if numbers]
    assert len(maps) == 4 - case.name.startswith("prefill-fp8/")
    for *_, box, _swizzle, promotion, _fill in maps:
        assert box[0] * (1 if "fp8" in name else 2) == 128
        assert 64 << (promotion - 1) == 128


@pytest.mark.parametrize(("page", "box"), [(16, 16), (24, 8), (48, 16), (64, 64), (256, 128)])
def test_boxes_are_parts_of_a_page_and_of_a_tile(page, box):
    assert plan_of(page_size=page).box_keys == box


@pytest.mark.parametrize(
    ("changes", "rows", "keys"),
    [({"causal": False, "max_seqlen_k": 8192}, 192, 128),
     ({"causal": False, "max_seqlen_q": 512}, 256, 64),
     ({"max_seqlen_q": 512, "max_seqlen_k": 512}, 256, 64), ({"max_seqlen_q": 32}, 128, 128),
     ({"max_seqlen_k": 8192, "max_seqlen_q": 8192}, 192, 128), ({"softcap": 5.0}, 128, 128),
     ({"softcap": 5.0, "max_seqlen_k": 8192}, 192, 96)],
)  # fmt: skip
def test_tiles_of_head_size_64_are_as_tall_as_the_lengths_are_worth(changes, rows, keys):
    given = {"headdim": 64, "num_heads_q": 8, "causal": True, **changes}
    tile = prefill_tile(problem_of(**given))
    assert (tile.rows, tile.keys) == (rows, keys)


def test_batch_invariant_calls_have_one_tile():
    tiles = {
        prefill_tile(replace(problem_of(headdim=64, max_seqlen_q=n), batch_invariant=True))
        for n in (32, 130, 512, 4096)
    }
    assert len(tiles) == 1


def test_bounds_plan_every_tile_that_calls_within_them_may_have():
    bounds = {p.variant for p in prefill_plans(problem_of(headdim=64, max_seqlen_k=16384), H200)}
    for length in (64, 500, 3000, 16384):
        problem = problem_of(headdim=64, max_seqlen_q=length, max_seqlen_k=length)
        assert make_prefill_plan(problem, H200).attend.variant in bounds


def test_packed_keys_come_in_one_box_a_panel():
    assert plan_of(page_size=None).box_keys == 128


@pytest.mark.parametrize(
    ("changes", "box"),
    [({"page_size": None}, 64), ({"page_size": 256}, 64), ({"page_size": 16}, 16),
     ({"page_size": 48}, 16), ({"headdim": 192, "headdim_v": 128, "page_size": 64}, 16),
     ({"headdim": 256, "page_size": 64}, 32)],
)  # fmt: skip
def test_keys_of_8_bit_caches_come_in_parts_of_a_tile(changes, box):
    plan = plan_of(**{"kv_dtype": "fp8", **changes})
    assert plan.box_keys == box
    assert "_e4m3_" in plan.attend.variant.symbol


@pytest.mark.parametrize(("heads", "pack"), [(8, 1), (32, 4), (24, 1), (48, 2), (64, 8)])
def test_heads_of_a_group_share_a_tile_as_far_as_rows_divide(heads, pack):
    assert plan_of(num_heads_q=heads).pack == pack


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"page_size": 8}, "page size 8"), ({"page_size": 20}, "page size 20"),
     ({"softmax_scale": -1.0}, "positive")],
)  # fmt: skip
def test_what_is_left_to_other_kernels(changes, word):
    scale = changes.pop("softmax_scale", None)
    problem = problem_of(**changes)
    if scale is not None:
        problem = replace(problem, softmax_scale=scale)
    assert word in prefill_refusal(problem, H200)
    assert prefill_plans(problem, H200) == []


def test_few_tiles_are_split_and_many_are_not():
    few = {"batch_size": 1, "max_seqlen_q": 64, "max_seqlen_k": 32768}
    plan = plan_of(**few)
    assert plan.combine is not None
    assert plan.tiling.chunk % 128 == 0
    assert plan_of().combine is None
    assert plan_of(num_splits=1, **few).combine is None
    assert plan_of(batch_invariant=True, **few).combine is None


def test_splits_fit_the_workspace_that_is_given():
    few = {"batch_size": 1, "max_seqlen_q": 64, "max_seqlen_k": 32768}
    for limit in (10_000, 3_000_000, 1 << 25):
        assert plan_of(limit, **few).attend.workspace_bytes <= max(limit, 4096)


def test_the_workspace_of_bounds_is_enough_for_every_call_within_them():
    bounds = {"batch_size": 8, "max_seqlen_q": 2048, "max_seqlen_k": 65536}
    enough = max(p.workspace_bytes for p in prefill_plans(problem_of(**bounds), H200))
    for batch in (1, 2, 8):
        for tokens in (17, 64, 300, 2048):
            smaller = {**bounds, "batch_size": batch, "max_seqlen_q": tokens}
            assert plan_of(**smaller).attend.workspace_bytes <= enough


@pytest.mark.parametrize(
    ("changes", "lead"),
    [({}, 512 - 66), ({"batch_size": 16}, 0), ({"causal": False}, 0),
     ({"max_seqlen_k": 4096, "max_seqlen_q": 4096}, 0),
     ({"window_size": (100, 0)}, 0)],
)  # fmt: skip
def test_of_many_short_requests_the_last_are_walked_by_length(changes, lead):
    given = {"batch_size": 32, "max_seqlen_q": 512, "max_seqlen_k": 512, "num_heads_q": 16,
             "num_heads_kv": 16, "page_size": None, "causal": True}  # fmt: skip
    plan = plan_of(**{**given, **changes})
    assert plan.numbers[5] == lead
