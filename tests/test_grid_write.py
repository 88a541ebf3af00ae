"""vLLM's grid of cache writes: 288 of them on a GPU, a sixth on NumPy.

Keys and values are slices of a fused projection [tokens, 3, heads, head size]. What no slot names
keeps its bits.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from conftest import Path

from cupyflash import reshape_and_cache_flash
from cupyflash.testing import DTYPES, write_oracle

TOKENS, HEADS = 42, 8
GRID = [
    {
        "dim": dim, "page": page, "blocks": blocks, "kind": kind, "cache": cache,
        "layout": layout, "scale": scale,
    }
    for scale, layout, cache, kind, blocks, page, dim in product(
        ("one", "head"), ("NHD", "HND"), ("auto", "fp8"), ("bf16", "fp32"), (512, 5000),
        (8, 16, 32), (64, 80, 256),
    )
]  # fmt: skip
SIXTH = [p for i, p in enumerate(p for p in GRID if p["blocks"] == 512) if i % 3 == i // 36 % 3]


def name_of(point):
    return "-".join(map(str, point.values()))


def untouched(path, blocks, page, heads, dim, kind, layout):
    """A cache of NaN as the view [blocks, page, heads, dim]; heads may lie outside of tokens."""
    bits = np.dtype(f"u{kind.itemsize}")
    nan = {1: 0x7F, 2: 0x7FFF, 4: 0x7FC00000}[kind.itemsize]
    shape = (blocks, page, heads, dim) if layout == "NHD" else (blocks, heads, page, dim)
    cache = path.xp.full(shape, nan, bits)
    cache = cache if layout == "NHD" else cache.transpose(0, 2, 1, 3)
    return (cache if kind.itemsize == 1 else cache.view(kind)), bits, nan


def check(path, point, heads=HEADS):
    rng, page, dim = np.random.default_rng(3), point["page"], point["dim"]
    source = rng.standard_normal((TOKENS + 2, 3, heads, dim)).astype(DTYPES[point["kind"]])
    slots = rng.permutation(point["blocks"] * page)[:TOKENS].astype(np.int64)
    slots[[5, 17]] = -1
    fused = path.array(source)
    fp8 = point["cache"] == "fp8"
    shape = (point["blocks"], page, heads, dim)
    stored = np.dtype(np.uint8) if fp8 else source.dtype
    made = [untouched(path, *shape, stored, point["layout"]) for _ in range(2)]
    scales = np.abs(source[:, 1:]).astype(np.float32).max(axis=(0, 3)) / 64
    scales = scales if point["scale"] == "head" else scales.max(axis=1, keepdims=True)
    reshape_and_cache_flash(
        fused[:, 1], fused[:, 2], made[0][0], made[1][0], path.array(slots), point["cache"],
        *(path.array(scale) for scale in scales),
    )  # fmt: skip
    live = np.flatnonzero(slots >= 0)
    block, offset = (path.array(x) for x in np.divmod(slots[live], page))
    for operand, scale, (cache, bits, nan) in zip((1, 2), scales, made, strict=True):
        found = cache.view(bits)
        rows = path.host(found[block, offset])
        empty = np.zeros((len(live), 1, heads, dim), stored)
        right = write_oracle(source[live, operand], empty, np.arange(len(live)), scale)[:, 0]
        assert rows.tobytes() == right.tobytes()
        found[block, offset] = nan
        assert bool((found == nan).all())


@pytest.mark.gpu
@pytest.mark.parametrize("point", GRID, ids=name_of)
def test_the_grid(point):
    check(Path("gpu"), point)


@pytest.mark.parametrize("point", SIXTH, ids=name_of)
def test_a_sixth_of_the_grid_on_numpy(point):
    check(Path("numpy"), point)


def test_the_sixth_covers_the_grid():
    assert (len(GRID), len(SIXTH)) == (288, 48)
    for name in GRID[0]:
        if name != "blocks":
            assert {point[name] for point in SIXTH} == {point[name] for point in GRID}


@pytest.mark.parametrize(("cache", "layout"), list(product(("auto", "fp8"), ("NHD", "HND"))))
def test_rows_without_alignment(large_path, cache, layout):
    """13 heads of 46: no row starts at 16 bytes."""
    point = {
        "dim": 46, "page": 16, "blocks": 128, "kind": "bf16", "cache": cache, "layout": layout,
        "scale": "head",
    }  # fmt: skip
    check(large_path, point, heads=13)
