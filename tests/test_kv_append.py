"""`flash_attn_with_kvcache`: appends in place, then attends; all or nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash.runtime.errors import CaptureError
from cupyflash.testing import expect_attention

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, KV_HEADS, DIM = 4, 2, 16


def draw(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def make(lengths, new, paged, seed=0, dtype=np.float32, cache_dtype=None, len_q=None):
    """Arguments of a call; unused slots are NaN."""
    rng = np.random.default_rng(seed)
    batch, capacity, page = len(lengths), 24, 4
    rows = (batch * capacity // page + 1, page) if paged else (batch, capacity)
    cache = np.full((2, *rows, KV_HEADS, DIM), np.nan, cache_dtype or dtype)
    table = None
    if paged:
        table = rng.permutation(rows[0] - 1).astype(np.int32).reshape(batch, -1) + np.int32(1)
    for i, length in enumerate(lengths):
        token = np.arange(length)
        where = (table[i, token // page], token % page) if paged else (i, token)
        cache[(slice(None), *where)] = draw(rng, 2, length, KV_HEADS, DIM).astype(cache.dtype)
    args = {
        "q": draw(rng, batch, new if len_q is None else len_q, HEADS, DIM, dtype=dtype),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "cache_seqlens": np.array(lengths, np.int32),
        "block_table": table,
        "causal": True,
    }
    if new:
        args["k"] = draw(rng, batch, new, KV_HEADS, DIM, dtype=dtype)
        args["v"] = draw(rng, batch, new, KV_HEADS, DIM, dtype=dtype)
    return args


def expected(args, before, new):
    """What the ragged oracle says about the cache with the new tokens put in by hand."""
    k_cache, v_cache = (cache.copy() for cache in before)
    table = args["block_table"]
    if table is None:
        table = np.arange(len(args["q"]), dtype=np.int32)[:, None]
    for i, length in enumerate(args["cache_seqlens"]):
        for j in range(new):
            slot = (table[i, (length + j) // k_cache.shape[1]], (length + j) % k_cache.shape[1])
            k_cache[slot] = args["k"][i, j].astype(k_cache.dtype)
            v_cache[slot] = args["v"][i, j].astype(v_cache.dtype)
    batch, len_q = args["q"].shape[:2]
    right = expect_attention(
        args["q"].reshape(batch * len_q, HEADS, DIM), k_cache, v_cache,
        cu_seqlens_q=np.arange(batch + 1, dtype=np.int32) * len_q, block_table=table,
        seqused_k=args["cache_seqlens"] + np.int32(new), causal=args["causal"],
    )  # fmt: skip
    return right, k_cache, v_cache


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4), new=st.integers(0, 4),
    paged=st.booleans(), dtype=st.sampled_from((np.float32, np.float16, BF16)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_append_then_attend(lengths, new, paged, dtype, seed):
    args = make(lengths, new, paged, seed, dtype, len_q=new or 2)
    before = args["k_cache"].copy(), args["v_cache"].copy()
    right, k_cache, v_cache = expected(args, before, new)
    out, lse = cupyflash.flash_attn_with_kvcache(**args, return_softmax_lse=True)
    assert args["k_cache"].tobytes() == k_cache.tobytes()
    assert args["v_cache"].tobytes() == v_cache.tobytes()
    batch, len_q = args["q"].shape[:2]
    flat = lse.transpose(1, 0, 2).reshape(HEADS, batch * len_q)
    right.check(out.reshape(batch * len_q, HEADS, DIM), flat)


def test_outputs_may_be_given():
    args = make((3, 9), 2, paged=True)
    out, lse = np.zeros((2, 2, HEADS, DIM), np.float32), np.zeros((2, HEADS, 2), np.float32)
    right = cupyflash.flash_attn_with_kvcache(
        **make((3, 9), 2, paged=True), return_softmax_lse=True
    )
    assert cupyflash.flash_attn_with_kvcache(**args, out=out, lse=lse) is out
    np.testing.assert_array_equal(out, right[0])
    np.testing.assert_array_equal(lse, right[1])


def test_lengths_may_be_one_number():
    right = cupyflash.flash_attn_with_kvcache(**make((5, 5), 1, paged=False))
    args = {**make((5, 5), 1, paged=False), "cache_seqlens": 5}
    np.testing.assert_array_equal(cupyflash.flash_attn_with_kvcache(**args), right)


def test_rows_of_a_cache_may_be_chosen():
    args = make((5, 7, 2), 1, paged=False)
    right = cupyflash.flash_attn_with_kvcache(**make((5, 7, 2), 1, paged=False))
    chosen = np.array([2, 0], np.int32)
    for name in ("q", "k", "v", "cache_seqlens"):
        args[name] = args[name][chosen]
    found = cupyflash.flash_attn_with_kvcache(**args, cache_batch_idx=chosen)
    np.testing.assert_allclose(found, right[chosen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cache_dtype", [np.uint8, ml_dtypes.float8_e4m3fn])
def test_fp8_caches_store_and_read_with_their_descales(cache_dtype):
    e4m3 = ml_dtypes.float8_e4m3fn
    args = make((3, 9), 2, True, dtype=np.float16, cache_dtype=e4m3)
    args.update({n: args[n].view(cache_dtype) for n in ("k_cache", "v_cache")})
    scales = {"k_descale": 0.5, "v_descale": np.array([2.0], np.float32)}
    out = cupyflash.flash_attn_with_kvcache(**args, **scales)
    assert np.isfinite(out.astype(np.float32)).all()
    stored = args["k_cache"].view(e4m3)[args["block_table"][0, 0], 3].astype(np.float32)
    np.testing.assert_array_equal(stored, (args["k"][0, 0] / 0.5).astype(e4m3).astype(np.float32))
    own = np.ones((2, KV_HEADS), np.float32)
    with pytest.raises(ValueError, match=r"k_descale has shape \(2, 2\): one scale writes"):
        cupyflash.flash_attn_with_kvcache(**args, k_descale=own)


REFUSED = [
    ({"rotary_cos": np.ones(4)}, NotImplementedError, "rotate q and k before the call"),
    ({"cache_leftpad": np.zeros(2, np.int32)}, NotImplementedError, "cache_leftpad"),
    ({"v": None}, ValueError, "pass both or neither"),
    ({"cache_seqlens": np.array([3, 9])}, TypeError, "cache_seqlens is int64"),
    ({"cache_seqlens": np.array([3], np.int32)}, ValueError, r"cache_seqlens .* must be \[2\]"),
    ({"cache_seqlens": None}, TypeError, "cache_seqlens"),
    ({"cache_seqlens": np.array([3, 23], np.int32)}, ValueError, "positions 3..24 .* hold 0..23"),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens=-1"),
    ({"q": np.zeros((4, HEADS, DIM))}, ValueError, r"q has shape .* must be \[batch, S, H, D\]"),
    ({"k": np.zeros((2, 1, KV_HEADS, DIM), np.float32)}, ValueError, "k has shape .* and v"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"window_size": (-3, 0)}, ValueError, "window_size"),
    ({"lse": np.zeros((2, HEADS, 3), np.float32)}, ValueError, r"lse is .* \[2, 4, 2\]"),
    ({"out": np.zeros((2, 2, HEADS, DIM))}, TypeError, "out is float64"),
    ({"cache_batch_idx": np.zeros(2, np.int32)}, ValueError, "exclude each other"),
    ({"block_table": np.full((2, 6), 99, np.int32)}, ValueError, "blocks 99..99"),
    ({"block_table": np.zeros((1, 6), np.int32)}, ValueError, "2 requests"),
    ({"stream": 0}, ValueError, "stream given"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_what_is_refused_leaves_the_cache_alone(change, error, words):
    args = make((3, 9), 2, paged=True)
    caches = args["k_cache"], args["v_cache"]
    before = [cache.copy() for cache in caches]
    with pytest.raises(error, match=words):
        cupyflash.flash_attn_with_kvcache(**{**args, **change})
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, old)


def test_a_cache_without_a_table_has_a_row_a_request():
    args = make((3, 9), 2, paged=False)
    args.update(k_cache=args["k_cache"][:1], v_cache=args["v_cache"][:1])
    with pytest.raises(ValueError, match="k_cache has 1 rows and q 2 requests"):
        cupyflash.flash_attn_with_kvcache(**args)


# On every path of attention


@pytest.mark.parametrize("paged", [False, True])
def test_append_then_attend_on_every_path(path, paged):
    args = make((3, 9), 2, paged, dtype=np.float16)
    right, k_cache, v_cache = expected(args, (args["k_cache"], args["v_cache"]), 2)
    given = {n: path.array(a) if isinstance(a, np.ndarray) else a for n, a in args.items()}
    out, lse = cupyflash.flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert path.host(given["k_cache"]).tobytes() == k_cache.tobytes()
    assert path.host(given["v_cache"]).tobytes() == v_cache.tobytes()
    lse = path.host(lse).transpose(1, 0, 2).reshape(HEADS, 4)
    right.check(path.host(out).reshape(4, HEADS, DIM), lse)


def test_batches_of_one_length_on_every_path(path):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, n, h, DIM, dtype=np.float16) for n, h in ((3, 4), (7, 2), (7, 2)))
    starts = [np.arange(3, dtype=np.int32) * n for n in (3, 7)]
    out, lse = cupyflash.flash_attn_func(
        *map(path.array, (q, k, v)), causal=True, return_softmax_lse=True
    )
    right = expect_attention(
        q.reshape(6, HEADS, DIM), k.reshape(14, KV_HEADS, DIM), v.reshape(14, KV_HEADS, DIM),
        cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], causal=True,
    )  # fmt: skip
    lse = path.host(lse).transpose(1, 0, 2).reshape(HEADS, 6)
    right.check(path.host(out).reshape(6, HEADS, DIM), lse)


@pytest.mark.gpu
def test_temporary_arrays_follow_the_stream_and_a_capture_is_refused():
    import cupy as cp

    def on_gpu():
        args = make((3, 9), 2, paged=True, dtype=np.float16)
        return {n: cp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in args.items()}

    right = cupyflash.flash_attn_with_kvcache(**on_gpu())
    stream = cp.cuda.Stream(non_blocking=True)
    for handle in (stream, stream.ptr):
        args = on_gpu()
        cp.cuda.get_current_stream().synchronize()
        out = cupyflash.flash_attn_with_kvcache(**args, stream=handle)
        stream.synchronize()
        cp.testing.assert_array_equal(out, right)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(CaptureError, match="call flash_attn_varlen_func with arrays"):
                cupyflash.flash_attn_with_kvcache(**args, out=out)
        finally:
            stream.end_capture()
