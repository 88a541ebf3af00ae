"""Cache writes: docs/contracts.md, on every path that has them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import reshape_and_cache_flash
from cupyflash.testing import DTYPES, LAYOUTS, place, write_oracle

FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def write(path, key, value, slots, caches, kind="auto", scales=(1.0, 1.0), layout="NHD"):
    """Caches after a write; the padding around every array is checked."""
    new = [place(array, "strided", xp=path.xp, pad=n) for n, array in enumerate((key, value))]
    old = [place(array, layout, xp=path.xp) for array in caches]
    scales = [path.array(s) if isinstance(s, np.ndarray) else s for s in scales]
    reshape_and_cache_flash(
        new[0].view, new[1].view, old[0].view, old[1].view, path.array(slots), kind, *scales
    )
    for placed in (*new, *old):
        placed.assert_padding_intact()
    return [path.host(placed.view) for placed in old]


def caches_of(blocks, page, heads, dims, dtype, seed=9):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 100, (blocks, page, heads, dim)).astype(np.uint8).astype(dtype)
        for dim in dims
    ]


@given(
    tokens=st.integers(0, 40), heads=st.sampled_from([1, 2, 13]),
    dims=st.sampled_from([(64, 64), (46, 46), (128, 72)]), page=st.sampled_from([16, 1, 32]),
    source=st.sampled_from(["bf16", "fp16", "fp32"]), kind=st.sampled_from(["auto", *FP8]),
    layout=st.sampled_from(LAYOUTS), slot_type=st.sampled_from([np.int64, np.int32]),
    per_head=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_write(
    write_path, tokens, heads, dims, page, source, kind, layout, slot_type, per_head, seed
):
    rng = np.random.default_rng(seed)
    blocks = tokens // page + 2
    key, value = (
        rng.standard_normal((tokens + 2, heads, dim)).astype(DTYPES[source]) for dim in dims
    )
    slots = rng.permutation(blocks * page)[:tokens].astype(slot_type)
    slots[rng.random(tokens) < 0.2] = -1
    dtype = np.uint8 if kind in FP8 else DTYPES[source]
    caches = caches_of(blocks, page, heads, dims, dtype)
    scales = [1.0, 1.0]
    if kind in FP8:
        scales = [rng.uniform(0.01, 2, heads if per_head else 1).astype(np.float32) for _ in "kv"]
    found = write(write_path, key, value, slots, caches, kind, scales, layout)
    for new, cache, scale, result in zip((key, value), caches, scales, found, strict=True):
        right = write_oracle(new, cache, slots, scale, fp8_dtype=FP8.get(kind, "e4m3"))
        assert result.tobytes() == right.tobytes()


@pytest.mark.parametrize("slot_type", [np.int32, np.int64])
def test_negative_slots_are_skipped(write_path, slot_type):
    key = np.ones((3, 2, 8), np.float16)
    caches = caches_of(3, 16, 2, (8, 8), np.float16)
    found = write(write_path, key, key, np.array([-1, 5, 33], slot_type), caches)
    for before, after in zip(caches, found, strict=True):
        changed = (before != after).any(axis=(2, 3))
        assert np.argwhere(changed).tolist() == [[0, 5], [2, 1]]


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("source", ["fp32", "bf16", "fp16"])
def test_every_value_rounds_to_nearest_even_and_saturates(write_path, kind, source):
    """All 16-bit values, and the neighbours of every tie of the fp8 type."""
    if source == "fp32":
        grid = np.arange(256, dtype=np.uint8).view(DTYPES[FP8[kind]]).astype(np.float32)
        grid = np.sort(grid[np.isfinite(grid)])
        ties = (grid[1:] + grid[:-1]) / 2
        values = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, -np.float32(9))]
        values = np.concatenate([*values, np.float32([np.inf, -np.inf, np.nan, 1e38, -1e38])])
    else:
        values = np.arange(2**16, dtype=np.uint16).view(DTYPES[source])
    values = np.concatenate([values, values[: -len(values) % 64]]).reshape(-1, 1, 64)
    slots = np.arange(len(values))
    cache = np.zeros((-(-len(values) // 16), 16, 1, 64), np.uint8)
    found = write(write_path, values, values, slots, [cache, cache], kind)
    right = write_oracle(values, cache, slots, fp8_dtype=FP8[kind])
    for result in found:
        np.testing.assert_array_equal(result, right)


def test_numpy_caches_of_ml_dtypes():
    key = np.linspace(-500, 500, 64, dtype=np.float32).reshape(1, 1, 64)
    cache = np.zeros((1, 16, 1, 64), ml_dtypes.float8_e4m3fn)
    right = write_oracle(key, cache, [3], 2.0)
    reshape_and_cache_flash(key, key, cache, cache, np.array([3]), "fp8", 2.0, 2.0)
    assert cache.tobytes() == right.tobytes()


BAD = {
    "slots of int16": ("slots", lambda s: s.astype(np.int16), TypeError),
    "slots of float": ("slots", lambda s: s.astype(np.float32), TypeError),
    "more slots than tokens": ("slots", lambda s: np.repeat(s, 2), ValueError),
    "another head size": ("key", lambda k: k[..., :4], ValueError),
    "another head count": ("value", lambda v: v[:, :1], ValueError),
    "keys of integers": ("key", lambda k: k.astype(np.int32), TypeError),
    "an unknown spelling": ("kind", lambda _: "fp8_e3m4", ValueError),
    "fp8 named for a 16-bit cache": ("kind", lambda _: "fp8", TypeError),
    "scale on a 16-bit cache": ("k_scale", lambda _: 2.0, ValueError),
    "scale of the wrong size": ("v_scale", lambda _: np.ones(3, np.float32), ValueError),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_writes_are_refused(write_path, what):
    name, change, error = BAD[what]
    given = {
        "key": np.ones((2, 2, 8), np.float16),
        "value": np.ones((2, 2, 8), np.float16),
        "key_cache": np.full((1, 16, 2, 8), 7, np.float16),
        "value_cache": np.full((1, 16, 2, 8), 7, np.float16),
        "slots": np.array([0, 1]),
        "kind": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    given[name] = change(given[name])
    arrays = [
        write_path.array(value) if isinstance(value, np.ndarray) else value
        for value in given.values()
    ]
    with pytest.raises(error):
        reshape_and_cache_flash(*arrays)
    for cache in arrays[2:4]:
        assert (write_path.host(cache) == 7).all()


def test_a_slot_past_the_end_is_refused_before_anything_is_written():
    key = np.ones((2, 1, 8), np.float16)
    cache = np.full((1, 16, 1, 8), 7, np.float16)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\]=16"):
        reshape_and_cache_flash(key, key, cache, cache, np.array([0, 16]), "auto", 1.0, 1.0)
    assert (cache == 7).all()
