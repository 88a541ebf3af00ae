"""vLLM's grid of ragged batches over a paged cache: 640 calls on a GPU, a tenth of them on NumPy.

Requests are (query tokens, keys). Blocks lie far apart in caches of up to 32768; all that no
request owns is NaN.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from batches import BF16, paged, random_batch, starts
from conftest import Path

from cupyflash import flash_attn_varlen_func
from cupyflash.testing import DTYPES, expect_attention, round_to, weight_precision

SEQUENCES = (((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)))
PAGE = 16
GRID = [
    {
        "use_out": use_out, "lengths": lengths, "heads": heads, "dim": dim, "window": window,
        "blocks": blocks, "version": version, "q_type": q_type,
    }
    for q_type, version, blocks, window, dim, heads, lengths, use_out in product(
        ("bf16", "e4m3"), (2, 3), (2048, 32768), (None, 256), (40, 72, 80, 128, 256),
        ((4, 4), (8, 2)), SEQUENCES, (True, False),
    )
]  # fmt: skip
# On NumPy there are no versions, and a cache of 32768 blocks shows nothing more.
TENTH = [point for point in GRID if point["version"] == 2 and point["blocks"] == 2048]
TENTH = [point for index, point in enumerate(TENTH) if index % 5 in (0, 3)]


def name_of(point):
    parts = (point[name] for name in point if name != "lengths")
    return "-".join(map(str, (*parts, point["lengths"][0][1])))


@cache
def operands(lengths, heads, dim, q_type):
    """q, k, v and the descales of 8-bit ones."""
    q_lens, kv_lens = zip(*lengths, strict=True)
    batch = random_batch(q_lens, kv_lens, *heads, dim)
    kind = DTYPES[q_type]
    q, k, v = (round_to(x, kind) for x in batch)
    if q_type != "e4m3":
        return (q, k, v), {}
    rng = np.random.default_rng(dim)
    names = ("q_descale", "k_descale", "v_descale")
    scales = {n: rng.uniform(0.5, 2, (len(lengths), heads[1])).astype(np.float32) for n in names}
    return tuple(x.view(np.uint8) for x in (q, k, v)), scales


@cache
def expected(lengths, heads, dim, window, q_type, **precision):
    (q, k, v), scales = operands(lengths, heads, dim, q_type)
    q_lens, kv_lens = zip(*lengths, strict=True)
    return expect_attention(
        q, k, v, cu_seqlens_q=starts(q_lens), cu_seqlens_k=starts(kv_lens), causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0), **scales, **precision,
    )  # fmt: skip


def far_caches(path, caches, table, blocks):
    """The same pages anywhere in caches of ``blocks`` blocks of NaN."""
    places = np.random.default_rng(7).permutation(blocks)[: caches[0].shape[0]]
    xp, found = path.xp, []
    for pages in caches:
        bits = np.dtype(f"u{pages.itemsize}")
        nan = 0x7F if pages.itemsize == 1 else 0x7FFF
        whole = xp.full((blocks, *pages.shape[1:]), nan, bits)
        whole[xp.asarray(places)] = xp.asarray(pages.view(bits))
        found.append(whole.view(pages.dtype))
    used = (table >= 0) & (table < len(places))
    return found, np.where(used, places[np.where(used, table, 0)], table).astype(np.int32)


def run(path, point):
    """out and lse of the call; None where the version asked for does not serve it."""
    q_lens, kv_lens = zip(*point["lengths"], strict=True)
    shape = (point["lengths"], point["heads"], point["dim"], point["q_type"])
    (q, k, v), scales = operands(*shape)
    caches, table = far_caches(path, *paged((k, v), kv_lens, PAGE), point["blocks"])
    out = path.array(np.full(q.shape, np.nan, BF16))
    version = None if path.name == "numpy" else point["version"]
    args = (path.array(q), *caches, max(q_lens), path.array(starts(q_lens)), max(kv_lens))
    options = dict(
        seqused_k=path.array(kv_lens, np.int32), block_table=path.array(table), causal=True,
        window_size=None if point["window"] is None else (point["window"] - 1, 0),
        fa_version=version, **{name: path.array(scale) for name, scale in scales.items()},
    )  # fmt: skip
    try:
        found, lse = flash_attn_varlen_func(
            *args, **options, out=out if point["use_out"] else None, return_softmax_lse=True
        )
    except ValueError as refusal:
        if version != 3 or "version 3" not in str(refusal):
            raise
        assert np.isnan(path.host(out).astype(np.float32)).all()
        return None
    assert not point["use_out"] or found is out
    return path.host(found), path.host(lse), weight_precision(*args, **options)


def check(path, point):
    found = run(path, point)
    if found is not None:
        *results, precision = found
        shape = (point["lengths"], point["heads"], point["dim"], point["window"])
        expected(*shape, point["q_type"], **precision).check(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("point", GRID, ids=name_of)
def test_the_grid(point):
    check(Path("gpu"), point)


@pytest.mark.parametrize("point", TENTH, ids=name_of)
def test_a_tenth_of_the_grid_on_numpy(point):
    check(Path("numpy"), point)


def test_the_tenth_covers_the_grid():
    assert (len(GRID), len(TENTH)) == (640, 64)
    for name in GRID[0]:
        if name not in ("version", "blocks"):
            assert {point[name] for point in TENTH} == {point[name] for point in GRID}
