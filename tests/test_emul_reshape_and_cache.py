"""The cache write on the emulator: shapes, slots, far pools, orders."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import example, given
from hypothesis import strategies as st

from cupyflash.kv_cache import reshape_and_cache_flash
from cupyflash.runtime.arrays import specs
from cupyflash.runtime.dtypes import FP16
from cupyflash.runtime.write_launch import write_cache
from cupyflash.testing import DTYPES, write_oracle

ARCHES = ["sm_80", "sm_90"]


def tokens_of(rng, count, heads, dim, kind):
    out = device_array((count, heads, dim), DTYPES[kind])
    out[...] = (rng.standard_normal(out.shape) * 100).astype(out.dtype)
    return out


@pytest.mark.parametrize("arch", ARCHES)
@given(
    count=st.integers(1, 60), heads=st.sampled_from([1, 2, 7, 40]),
    dims=st.sampled_from([(64, 64), (128, 96), (8, 24), (3, 5), (192, 128), (1, 8)]),
    block_size=st.sampled_from([1, 3, 16, 37]), kinds=st.sampled_from(
        [("bf16", "bf16"), ("fp16", "fp8"), ("bf16", "fp8_e5m2"), ("fp32", "fp8"), ("fp32", "fp16")]
    ),
    wide=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
@example(count=0, heads=2, dims=(64, 64), block_size=16, kinds=("bf16", "bf16"), wide=True, seed=1)
def test_any_shape_in_any_order(arch, count, heads, dims, block_size, kinds, wide, seed):
    count = min(count, max(1, 6000 // (heads * dims[0])))
    rng = np.random.default_rng(seed)
    kind, spelling = kinds
    stored = DTYPES["fp16"] if spelling == "fp16" else DTYPES["bf16"]
    fp8 = spelling.startswith("fp8")
    blocks = -(-count // block_size) + 2
    key, value = (tokens_of(rng, count + 1, heads, dim, kind) for dim in dims)
    key[count:], value[count:] = np.nan, np.nan  # padding: more tokens than slots
    caches = [
        device_array((blocks, block_size, heads, dim), np.uint8 if fp8 else stored) for dim in dims
    ]
    before = [cache.copy() for cache in caches]
    slots = rng.permutation(blocks * block_size)[:count].astype(np.int64 if wide else np.int32)
    kind_of_slot = rng.random(count)
    slots[kind_of_slot < 0.2] *= -1
    slots[kind_of_slot > 0.9] += blocks * block_size  # past the end: skipped too
    past = slots >= blocks * block_size
    scales = (2.0, rng.uniform(0.5, 4, heads).astype(np.float32)) if fp8 else (1.0, 1.0)
    with emulated(arch, seed=seed):
        reshape_and_cache_flash(key, value, *caches, slots, spelling if fp8 else "auto", *scales)
    kept = np.where(past, -1, slots)
    for cache, old, new, scale in zip(caches, before, (key, value), scales, strict=True):
        right = write_oracle(new, old, kept, scale, fp8_dtype=spelling)
        assert right.tobytes() == cache.tobytes()


def test_wide_and_narrow_accesses_give_the_same_bits():
    rng = np.random.default_rng(1)
    key = tokens_of(rng, 20, 3, 64, "bf16")
    odd = device_array(key.nbytes + 2)[2:].view(key.dtype).reshape(key.shape)
    odd[...] = key
    slots = rng.permutation(32)[:20]
    found = []
    for source in (key, odd):
        caches = [device_array((2, 16, 3, 64)) for _ in range(2)]
        with emulated("sm_90"):
            reshape_and_cache_flash(source, source, *caches, slots, "fp8", 0.5, 0.25)
        found.append([cache.tobytes() for cache in caches])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_more_than_4_gib_apart(reverse):
    far = 5 << 30
    pool = np.frombuffer(mmap.mmap(-1, 2 * far + 4096), np.uint8)
    cache = np.lib.stride_tricks.as_strided(pool[:1].view(np.uint8), (3, 2, 1, 8), (far, 8, 8, 1))
    cache = cache[::-1] if reverse else cache
    rng = np.random.default_rng(2)
    key = tokens_of(rng, 3, 1, 8, "fp16")
    value_cache = device_array((3, 2, 1, 8))
    with emulated("sm_80"):
        reshape_and_cache_flash(key, key, cache, value_cache, np.array([1, 2, 5]), "fp8", 1.0, 1.0)
    np.testing.assert_array_equal(
        cache.reshape(6, 8)[[1, 2, 5]], value_cache.reshape(6, 8)[[1, 2, 5]]
    )
    assert not cache.reshape(6, 8)[[0, 3, 4]].any()


def test_slots_past_2_to_the_32():
    blocks, block_size = 1 << 31, 6  # all blocks are one in memory
    one = device_array((1, block_size, 1, 8), np.float16, fill=0)
    cache = np.lib.stride_tricks.as_strided(one, (blocks, block_size, 1, 8), (0, *one.strides[1:]))
    values = np.lib.stride_tricks.as_strided(one.copy(), cache.shape, cache.strides)
    slots = np.array([blocks * block_size - 1, (1 << 32) + 2, 5 - (1 << 32), -(1 << 40)])
    rng = np.random.default_rng(3)
    key = tokens_of(rng, 4, 1, 8, "fp16")
    with emulated("sm_80"):
        arrays = (key, key, cache, values, slots, None, None)
        write_cache(arrays, specs(arrays), (1.0, 1.0), FP16, None)
    assert one[0, 5].tobytes() == key[0].tobytes()
    assert one[0, ((1 << 32) + 2) % 6].tobytes() == key[1].tobytes()
    assert np.count_nonzero(one.any((0, 2, 3))) == 2


@given(
    block_size=st.one_of(st.integers(1, 5000), st.sampled_from([1 << 16, (1 << 16) + 1])),
    data=st.data(),
)
def test_the_quotient_by_a_product_is_exact(block_size, data):
    largest = (1 << 63) // block_size**2 * block_size  # slots * block_size stays below 2^64
    slot = data.draw(st.one_of(st.integers(0, largest), st.integers(0, 1 << 20)))
    near = slot // block_size * block_size
    inverse = -(-(1 << 64) // block_size) % (1 << 64)
    for n in (slot, near, max(near - 1, 0), near + block_size - 1):
        quotient = n if block_size == 1 else n * inverse >> 64
        assert quotient == n // block_size


def test_bfloat16_nans_are_copied_bit_by_bit():
    key = device_array((1, 1, 8), DTYPES["bf16"])
    key.view(np.uint16)[...] = [0x7F81, 0xFFC1, 0x7FFF, 0, 0x8000, 1, 0x7F80, 0xFF80]
    caches = [device_array((1, 1, 1, 8), DTYPES["bf16"]) for _ in range(2)]
    with emulated("sm_80"):
        reshape_and_cache_flash(key, key, *caches, np.array([0]), "auto", 1.0, 1.0)
    assert caches[0].tobytes() == caches[1].tobytes() == key.tobytes()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_values_are_divided_by_the_scale_not_multiplied_by_its_inverse(arch):
    rng = np.random.default_rng(4)
    exact = np.arange(0x7F, dtype=np.uint8).view(DTYPES["e4m3"]).astype(np.float32)
    ties = np.concatenate([(exact[1:] + exact[:-1]) / 2, [0, 0]]).astype(np.float32)
    scales = rng.integers(1, 1 << 12, 16).astype(np.float32)  # so that tie * scale is exact
    key = device_array((1, 16, 128), np.float32)
    key[...] = ties * scales[:, None]
    caches = [device_array((1, 1, 16, 128)) for _ in range(2)]
    slots = np.array([0])
    right = write_oracle(key, caches[0], slots, scales)
    assert (right != write_oracle(key * (1 / scales[:, None]), caches[0], slots)).any()
    with emulated(arch):
        reshape_and_cache_flash(key, key, *caches, slots, "fp8", scales, scales)
    assert caches[0].tobytes() == caches[1].tobytes() == right.tobytes()


def odd_view(shape, kind, offset=2):
    """A view that starts ``offset`` bytes past a multiple of 256."""
    count = int(np.prod(shape)) * DTYPES[kind].itemsize
    return device_array(count + offset)[offset:].view(DTYPES[kind]).reshape(shape)


HEADS_FIRST = (0, 2, 1, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda shape: device_array(shape, DTYPES["bf16"]),
        lambda shape: odd_view(shape, "bf16"),
        lambda shape: odd_view(shape, "bf16", 8),
        lambda shape: device_array([shape[i] for i in HEADS_FIRST], DTYPES["bf16"]).transpose(
            HEADS_FIRST
        ),
        lambda shape: device_array((*shape[:3], 200), DTYPES["bf16"])[..., 4:196],
        lambda shape: device_array((*shape[:3], 200), DTYPES["bf16"])[..., 8:200],
    ],
    ids=["plain", "odd", "half", "heads first", "half strides", "strides"],
)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_long_rows_to_caches_of_any_layout(make, side, kind):
    rng = np.random.default_rng(5)
    shape = (2, 3, 40, 192)
    caches = [device_array(shape, DTYPES["bf16"]), make(shape)]
    key, value = (tokens_of(rng, 4, 40, 192, kind) for _ in range(2))
    slots = np.array([5, -1, 0, 2], np.int32)
    right = [
        write_oracle(new, cache, slots) for new, cache in zip((key, value), caches, strict=True)
    ]
    order = slice(None, None, 1 if side else -1)  # which of key and value has the layout
    news, pools = (key, value)[order], caches[order]
    with emulated("sm_80"):
        reshape_and_cache_flash(*news, *pools, slots, "auto", 1.0, 1.0)
    for cache, expected in zip(caches, right, strict=True):
        assert cache.tobytes() == expected.tobytes()
