"""Public reports on pages, strides and 64-bit addresses; docs/public_reports.md names them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, attend, check, mean_batch, paged, random_batch, run, starts

from cupyflash import flash_attn_varlen_func, flash_attn_with_kvcache, reshape_and_cache_flash
from cupyflash.testing import expect_attention

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("page_size", [16, 64])
def test_b28_the_last_tile_stays_inside_an_exact_table(path, page_size):
    args = arguments(path, *random_batch([1], [257], 4, 2, dtype=BF16), [1], [257], page_size)
    columns = -(-257 // page_size)
    table = np.append(path.host(args["block_table"])[:, :columns], [[2**30]], axis=1)
    args["block_table"] = path.array(table.astype(np.int32))[:, :columns]
    check(path, args)


@pytest.mark.parametrize("tail", [-1, 2**30])
def test_b29_the_tail_of_the_table_is_not_dereferenced(path, tail):
    kv_lens = [5, 0, 70]
    args = arguments(path, *random_batch([1, 1, 2], kv_lens), [1, 1, 2], kv_lens, 16)
    right = run(path, args)
    table = path.host(args["block_table"]).copy()
    table[table == 2**31 - 1] = tail
    found = run(path, {**args, "block_table": path.array(table)})
    for left, expected in zip(found, right, strict=True):
        np.testing.assert_array_equal(left, expected)


def test_b29_a_table_without_columns(path):
    args = arguments(path, *random_batch([1, 1], [0, 0]), [1, 1], [0, 0], 16)
    args["block_table"] = args["block_table"][:, :0]
    out, lse = run(path, args)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_b31_unwritten_slots_of_a_used_page(path, fill):
    args = arguments(path, *random_batch([1], [13], 4, 2, dtype=BF16), [1], [13], 4)
    results = []
    for value in (0.0, fill):
        caches = {name: path.host(args[name]).copy() for name in "kv"}
        for cache in caches.values():
            cache[np.isnan(cache.astype(np.float32))] = value
        results.append(run(path, {**args, **{n: path.array(c) for n, c in caches.items()}}))
    assert np.isfinite(results[1][0]).all()
    np.testing.assert_array_equal(results[0][0], results[1][0])


def test_b31_unwritten_rows_of_a_dense_cache(path):
    q, k, v = random_batch([2], [6], dtype=BF16)
    k[[1, 2]], v[[1, 2]] = np.nan, np.nan
    cache = [path.array(a.reshape(2, 3, 1, 64)) for a in (k, v)]
    lengths = path.array([1, 3], np.int32)
    out = flash_attn_with_kvcache(path.array(q.reshape(2, 1, 1, 64)), *cache, cache_seqlens=lengths)
    used = np.array([0, 3, 4, 5])
    right = expect_attention(
        q, k[used], v[used], cu_seqlens_q=starts([1, 1]), cu_seqlens_k=starts([1, 3])
    )
    right.check(path.host(out).reshape(2, 1, 64))


def test_b32_padded_requests_point_at_a_null_block_of_nan(path):
    kv_lens = [7, 33, 16]
    batch = random_batch([1] * 3, kv_lens, dtype=BF16)
    args = arguments(path, *batch, [1] * 3, kv_lens, 16)
    right = run(path, args)
    caches, table = paged(batch[1:], kv_lens, 16)
    null = [np.full((1, *cache.shape[1:]), np.nan, cache.dtype) for cache in caches]
    table = np.where(table < len(caches[0]), table + 1, table)
    padded = {
        "q": path.array(np.concatenate([batch[0], batch[0][:2]])),
        "k": path.array(np.concatenate([null[0], caches[0]])),
        "v": path.array(np.concatenate([null[1], caches[1]])),
        "cu_seqlens_q": path.array(starts([1] * 5)),
        "seqused_k": path.array([*kv_lens, 0, 0], np.int32),
        "block_table": path.array(np.pad(table, ((0, 2), (0, 0)))),
    }
    out, lse = run(path, {**args, **padded})
    np.testing.assert_array_equal(out[:3], right[0])
    np.testing.assert_array_equal(lse[:, :3], right[1])
    assert (out[3:] == 0).all()
    assert np.isneginf(lse[:, 3:]).all()


def test_b34_heads_outside_of_tokens(path):
    q, k, v = random_batch([4], [40], 8, 8, dtype=BF16)
    results = []
    for shape, axes in (((3, 16, 8, 64), (0, 1, 2, 3)), ((3, 8, 16, 64), (0, 2, 1, 3))):
        caches = [path.array(np.full(shape, np.nan, BF16)).transpose(*axes) for _ in "kv"]
        slots = path.array(np.arange(40) + 8)
        reshape_and_cache_flash(path.array(k), path.array(v), *caches, slots, "auto", 1.0, 1.0)
        flat = path.host(caches[0]).reshape(48, 8, 64)
        assert flat[8:].tobytes() == k.tobytes()
        args = arguments(path, q, k, v, [4], [40], causal=True)
        del args["cu_seqlens_k"]
        table, used = path.array([[0, 1, 2]], np.int32), path.array([48], np.int32)
        args.update(k=caches[0], v=caches[1], block_table=table, seqused_k=used, max_seqlen_k=48)
        results.append(run(path, {**args, "window_size": (36, 0)}))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert np.isfinite(results[0][0]).all()


def test_b35_keys_and_values_with_their_own_strides(path):
    q, k, v = random_batch([3], [20], 4, 2, dtype=BF16)
    args = arguments(path, q, k, v, [3], [20])
    right = check(path, args)
    wide = path.array(np.full((40, 2, 64), np.nan, BF16))
    wide[::2] = path.array(k)
    found = run(path, {**args, "k": wide[::2]})
    np.testing.assert_array_equal(found[0], right[0])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_b37_a_last_dimension_that_is_not_contiguous(path, name):
    args = arguments(path, *random_batch([3], [20], dtype=BF16), [3], [20])
    doubled = path.array(np.repeat(path.host(args[name]), 2, axis=2))[..., ::2]
    fortran = path.xp.asfortranarray(args[name])
    for operand in (doubled, fortran):
        with pytest.raises(ValueError, match=f"{name} has shape .*contiguous"):
            flash_attn_varlen_func(**{**args, name: operand})


@pytest.mark.parametrize("blocks", [70000, 132000])
def test_b38_offsets_past_31_and_32_bits(large_path, blocks):
    """20 tokens in the last two blocks, and the same bytes in the first two."""
    rng = np.random.default_rng(0)
    cache = large_path.xp.zeros((blocks, 16, 16, 128), np.uint8)
    values = large_path.array(rng.integers(0, 0x60, (2, 16, 16, 128)).astype(np.uint8))
    cache[:2] = values
    cache[blocks - 1], cache[blocks - 2] = values[0], values[1]
    q = large_path.array(rng.standard_normal((1, 16, 128)).astype(BF16))
    results = [
        flash_attn_varlen_func(
            q, cache, cache, 1, large_path.array(starts([1])), 32, fp8_dtype="e4m3",
            block_table=large_path.array(table, np.int32),
            seqused_k=large_path.array([20], np.int32),
        )
        for table in ([[0, 1]], [[blocks - 1, blocks - 2]])
    ]  # fmt: skip
    assert large_path.host(results[0]).tobytes() == large_path.host(results[1]).tobytes()
    assert large_path.host(results[0]).astype(np.float32).any()


@pytest.mark.parametrize("blocks", [70000, 132000])
def test_b38_cache_writes_past_31_and_32_bits(write_path, blocks):
    if write_path.name.startswith("emulator"):
        pytest.skip("its shadow memory would be as large as the cache")
    caches = [write_path.xp.zeros((blocks, 16, 16, 128), np.uint8) for _ in "kv"]
    key = np.random.default_rng(1).standard_normal((20, 16, 128)).astype(BF16)
    slots = np.concatenate([np.arange(16) + (blocks - 1) * 16, np.arange(4)])
    new = [write_path.array(key) for _ in "kv"]
    reshape_and_cache_flash(*new, *caches, write_path.array(slots), "fp8", 1.0, 1.0)
    right = key.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for cache in caches:
        assert write_path.host(cache[blocks - 1]).tobytes() == right[:16].tobytes()
        assert write_path.host(cache[0, :4]).tobytes() == right[16:].tobytes()
        assert not write_path.host(cache[1 : blocks - 1 : 1000]).any()


def test_b40_a_row_stride_of_a_million_elements(large_path):
    """2100 rows; on the CPU fewer and farther apart, since untouched memory costs nothing there."""
    rows, stride = (24, 2**27) if large_path.name == "numpy" else (2100, 2**20)
    q, k, v = random_batch([rows], [50], 2, 1, dtype=BF16)
    args = arguments(large_path, q, k, v, [rows], [50])
    right = run(large_path, args)
    wide, out = (large_path.xp.zeros((rows, stride // 64, 64), BF16)[:, :2] for _ in range(2))
    wide[...] = args["q"]
    flash_attn_varlen_func(**{**args, "q": wide}, out=out)
    np.testing.assert_array_equal(large_path.host(out).astype(np.float64), right[0])


def test_b40_a_row_stride_past_2_gb(path):
    """Few rows; untouched memory between them costs nothing but on a GPU."""
    rows, stride = 9, 2**27
    q, k, v = random_batch([rows], [50], 2, 1, dtype=np.float16)
    args = arguments(path, q, k, v, [rows], [50])
    right = run(path, args)
    wide = path.xp.zeros((rows, stride // 64, 64), np.float16)[:, :2]
    wide[...] = args["q"]
    np.testing.assert_array_equal(run(path, {**args, "q": wide})[0], right[0])


@pytest.mark.parametrize(
    ("negative", "kind"), [(-1, np.int32), (-1, np.int64), (-4294967295, np.int64)]
)
def test_b41_negative_slots_of_both_integer_types(write_path, negative, kind):
    slots = [negative, 5, 33]
    key = np.ones((3, 1, 64), np.float16)
    arrays = [write_path.array(key) for _ in "kv"]
    caches = [write_path.array(np.zeros((3, 16, 1, 64), np.float16)) for _ in "kv"]
    reshape_and_cache_flash(*arrays, *caches, write_path.array(slots, kind), "auto", 1.0, 1.0)
    for cache in caches:
        written = write_path.host(cache).reshape(48, 64).any(axis=1)
        assert np.flatnonzero(written).tolist() == [5, 33]


@pytest.mark.parametrize("kind", [np.int16, np.uint64, np.float32])
def test_b41_slots_of_other_types_are_refused(write_path, kind):
    key = write_path.array(np.ones((1, 1, 64), np.float16))
    cache = write_path.array(np.zeros((1, 16, 1, 64), np.float16))
    with pytest.raises(TypeError, match="slot_mapping"):
        reshape_and_cache_flash(
            key, key, cache, cache, write_path.array([1], kind), "auto", 1.0, 1.0
        )


def ragged_over_zero_padded_tables(path, q_lens, kv_lens):
    batch = random_batch(q_lens, kv_lens, 4, 1, dtype=BF16)
    args = arguments(path, *batch, q_lens, kv_lens, 16)
    table = path.host(args["block_table"])
    table = np.pad(np.where(table < 2**31 - 1, table, 0), ((0, 0), (0, 400)))
    check(path, {**args, "block_table": path.array(table.astype(np.int32)), "causal": True})


def test_b43_a_ragged_batch_with_long_zero_padded_tables(large_path):
    ragged_over_zero_padded_tables(large_path, [68, 322, 1230], [196, 450, 1358])


def test_b43_a_small_ragged_batch_with_long_zero_padded_tables(path):
    ragged_over_zero_padded_tables(path, [6, 20, 33], [36, 50, 70])


def one_page_for_all(path, requests, q_len, kv_len):
    """Requests that all read one page of v[j] = j with q = 0."""
    _, k, v = mean_batch([1], [kv_len], dtype=np.float16)
    queries = path.array(np.zeros((requests * q_len, 1, 64), np.float16))
    return {
        "q": queries, "k": path.array(k[None]), "v": path.array(v[None]),
        "max_seqlen_q": q_len, "max_seqlen_k": kv_len,
        "cu_seqlens_q": path.array(np.arange(requests + 1) * q_len, np.int32),
        "seqused_k": path.array(np.full(requests, kv_len), np.int32),
        "block_table": path.array(np.zeros((requests, 1)), np.int32),
    }  # fmt: skip


@pytest.mark.parametrize(("requests", "q_len", "kv_len"), [(65536, 1, 1), (80000, 16, 3)])
def test_b44_more_requests_than_a_grid_has_rows(large_path, requests, q_len, kv_len):
    args = one_page_for_all(large_path, requests, q_len, kv_len)
    out = large_path.xp.full(args["q"].shape, np.nan, np.float16)
    flash_attn_varlen_func(**args, out=out)
    assert (large_path.host(out) == (kv_len - 1) / 2).all()


def test_b44_more_heads_than_a_grid_has_rows(large_path):
    q, k, v = mean_batch([3], [3], 71280, 71280, 8, np.float16)
    out, lse = attend(large_path, q, k, v, [3], [3])
    assert (out == 1).all()
    np.testing.assert_allclose(lse, np.log(3), rtol=1e-6)


@pytest.mark.parametrize("bounds", [{"max_seqlen_q": 3}, {"max_seqlen_k": 256}])
def test_b46_lengths_above_their_bound(path, bounds, monkeypatch):
    """Refused where lengths are read: on the CPU always, on a GPU when checks are on."""
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    args = arguments(path, *random_batch([5], [300]), [5], [300], causal=True)
    (name,) = bounds
    with pytest.raises(ValueError, match=f"{name}={bounds[name]}"):
        run(path, {**args, **bounds})
