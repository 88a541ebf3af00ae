"""Batches of the sizes that engines run, through builder and layer: all on a GPU, a tenth on NumPy.

Requests are (query tokens, keys). Heads are those of a small model, 16 and 8 of size 128, over 1, 2
and 4 ranks of tensor parallelism.
"""

from __future__ import annotations

from itertools import product

import pytest
from step_cases import Case
from steps import Made

BATCHES = {
    "small_decode": [(1, 32), (1, 40)],
    "small_prefill": [(8, 32), (8, 40)],
    "small_mixed": [(1, 32), (1, 40), (5, 48), (5, 56)],
    "medium_decode": [(1, 256 * n) for n in range(1, 9)],
    "medium_prefill": [(16, 128 * n) for n in range(1, 9)],
    "medium_mixed": [(1, 512), (1, 1000), (1, 1024), (7, 300), (16, 512), (65, 700)],
    "large_decode": [(1, 2048)] * 32,
    "large_prefill": [(32, 4096)] * 8,
    "single_decode": [(1, 1024)],
    "single_prefill": [(64, 1024)],
    "whole_prompts": [(257, 257), (1, 1), (64, 64)],
}
MASKS = {
    "causal": {},
    "window": {"window": 256},
    "both_ways": {"causal": False},
    "window_both_ways": {"causal": False, "window": 100},
    "capped": {"softcap": 50.0, "sink": True},
}
GRID = [
    (batch, mask, kv, ranks)
    for ranks, kv, mask, batch in product((1, 2, 4), ("auto", "fp8"), MASKS, BATCHES)
]
TENTH = [point for index, point in enumerate(GRID) if index % 10 == 3]
LARGEST_ON_NUMPY = 20_000  # keys


def check(path, batch, mask, kv, ranks):
    lengths = tuple((q, keys - q) for q, keys in BATCHES[batch])
    case = Case(
        lengths,
        num_kv_heads=8 // ranks,
        group_size=2,
        head_size=128,
        dtype="bf16",
        kv_cache_dtype=kv,
        layout="packed-LBNHC",
        pad_reqs=1,
        **MASKS[mask],
    )
    made = Made(path, case)
    out = made.run(made.builder.build(0, made.common))
    made.expected().check(out)


@pytest.mark.parametrize(
    "point", [p for p in TENTH if sum(k for _, k in BATCHES[p[0]]) <= LARGEST_ON_NUMPY]
)
def test_a_tenth_of_the_grid_on_numpy(point):
    from conftest import Path

    check(Path("numpy"), *point)


@pytest.mark.gpu
@pytest.mark.parametrize("point", GRID)
def test_the_grid(point):
    from conftest import Path

    check(Path("gpu"), *point)


def test_the_tenth_covers_the_grid():
    """Every batch that fits, mask, cache and number of ranks is in it."""
    small = {
        b for b, requests in BATCHES.items() if sum(k for _, k in requests) <= LARGEST_ON_NUMPY
    }
    assert small <= {batch for batch, *_ in TENTH}
    assert {mask for _, mask, *_ in TENTH} == set(MASKS)
    assert {(kv, ranks) for *_, kv, ranks in TENTH} == set(product(("auto", "fp8"), (1, 2, 4)))
