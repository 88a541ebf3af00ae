"""What holds on the NumPy path alone: values it can check, memory, speed."""

from __future__ import annotations

import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, mean_batch, random_batch, starts

from cupyflash import (
    cascade_attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from cupyflash.testing import LAYOUTS, PATTERNS, Case, attention_oracle, expect_attention


class Numpy:
    name, xp = "numpy", np
    array = staticmethod(np.asarray)
    host = staticmethod(np.asarray)


def packed(q, k, v, q_lens, kv_lens, **options):
    return arguments(Numpy, q, k, v, q_lens, kv_lens, **options)


# Long and wide: steps of keys, tiles of rows, stacks of requests


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("lengths", [((300, 900),), ((17, 1030), (1, 2047), (16, 511), (1, 0))])
def test_many_steps_and_tiles(pattern, page_size, lengths):
    case = Case(
        lengths=lengths, num_heads_kv=2, group_size=2, page_size=page_size, causal=True,
        window_size=(700, 0), pattern=pattern, sink=True,
    )  # fmt: skip
    case.make().check(flash_attn_varlen_func)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_type", ["fp16", "e4m3", "e5m2"])
def test_a_large_decode_batch(layout, kv_type):
    rng = np.random.default_rng(0)
    lengths = tuple((1, int(n)) for n in rng.integers(-1, 700, 100))
    case = Case(
        lengths=lengths, num_heads_kv=2, group_size=4, page_size=16, q_type="fp16",
        kv_type=kv_type, layout=layout, causal=True,
    )  # fmt: skip
    case.make().check(flash_attn_varlen_func)


def test_head_sizes_of_value_and_key_may_differ():
    case = Case(lengths=((9, 30), (1, 80)), head_dim=192, head_dim_v=128, page_size=16)
    case.make().check(flash_attn_varlen_func)


# Values that only a read can tell


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": [0, 3, 2]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 2, 9]}, "at most at 4"),
        ({"cu_seqlens_q": [-1, 2, 4]}, "cu_seqlens_q"),
        ({"cu_seqlens_k": [0, 50, 3]}, "cu_seqlens_k"),
        ({"cu_seqlens_k": [0, 3, 50]}, "cu_seqlens_k"),
        ({"seqused_k": [9, 1]}, r"seqused_k\[0\]=9"),
        ({"seqused_k": [1, -1]}, r"seqused_k\[1\]=-1"),
    ],
)
def test_wrong_lengths_are_refused_before_anything_is_written(change, words):
    args = packed(*random_batch([2, 2], [5, 6]), [2, 2], [5, 6])
    args.update({name: np.array(value, np.int32) for name, value in change.items()})
    out = np.full((4, 1, 64), 7, np.float32)
    with pytest.raises(ValueError, match=words):
        flash_attn_varlen_func(**args, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
def test_a_used_table_entry_outside_of_the_cache_is_refused(entry):
    args = arguments(Numpy, *random_batch([1], [40]), [1], [40], 16)
    args["block_table"] = args["block_table"].copy()
    args["block_table"][0, 1] = entry
    with pytest.raises(ValueError, match=r"block_table\[0, 1\]"):
        flash_attn_varlen_func(**args)
    args["window_size"] = (7, 0)  # keys 32 and on: column 1 is not used
    assert np.isfinite(flash_attn_varlen_func(**args)).all()


def test_more_keys_than_the_table_has_room_for_are_refused():
    args = arguments(Numpy, *random_batch([1], [40]), [1], [40], 16)
    args["seqused_k"] = np.array([65], np.int32)
    with pytest.raises(ValueError, match=r"seqused_k\[0\]=65"):
        flash_attn_varlen_func(**args)


def test_floating_point_flags_of_the_caller_do_not_matter():
    case = Case(lengths=((3, 40), (2, -2)), page_size=16, causal=True, sink=True)
    with np.errstate(all="raise"):
        case.make().check(flash_attn_varlen_func)


# The other entry points


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths(causal):
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((3, n, h, 64)).astype(np.float32) for n, h in ((5, 4), (9, 2), (9, 2))
    )
    out, lse = flash_attn_func(q, k, v, causal=causal, return_softmax_lse=True)
    for b in range(3):
        right = attention_oracle(q[b], k[b], v[b], causal=causal)
        np.testing.assert_allclose(out[b], right[0], atol=2e-6)
        np.testing.assert_allclose(lse[b], right[1], atol=2e-6)


@pytest.mark.parametrize("paged", [False, True])
def test_append_then_attend(paged):
    rng = np.random.default_rng(2)
    new = [rng.standard_normal((2, 3, h, 64)).astype(np.float32) for h in (4, 2, 2)]
    old = [rng.standard_normal((2, 32, 2, 64)).astype(np.float32) for _ in "kv"]
    cached, used = [array.copy() for array in old], np.array([5, 20], np.int32)
    options = {}
    if paged:
        order = np.array([[2, 0], [3, 1]], np.int32)
        cached = [np.empty((4, 16, 2, 64), np.float32) for _ in "kv"]
        for cache, rows in zip(cached, old, strict=True):
            cache[order.ravel()] = rows.reshape(4, 16, 2, 64)
        options["block_table"] = order
    out = flash_attn_with_kvcache(
        new[0], *cached, *new[1:], cache_seqlens=used, causal=True, **options
    )
    for b in range(2):
        keys, values = (
            np.concatenate([cache[b, : used[b]], rows[b]])
            for cache, rows in zip(old, new[1:], strict=True)
        )
        right, _ = attention_oracle(new[0][b], keys, values, causal=True)
        np.testing.assert_allclose(out[b], right, atol=2e-6)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("sink", [False, True])
def test_cascade_is_attention(kind, sink):
    case = Case(
        lengths=((1, 90), (4, 40), (1, 32)), num_heads_kv=2, group_size=2, page_size=16,
        causal=True, q_type=kind, kv_type=kind, sink=sink, softcap=5.0,
    )  # fmt: skip
    inputs = case.make()
    args = inputs.args
    args["block_table"] = args["block_table"].copy()
    args["block_table"][:, :2] = args["block_table"][0, :2]
    rows = sum(case.q_lens)
    output = np.full((rows, 4, 64), np.nan, args["q"].dtype)
    cascade_attention(
        output, args["q"][:rows], args["k"], args["v"], args["cu_seqlens_q"], 4,
        starts([rows]), np.array([32], np.int32), args["seqused_k"] - np.int32(32), 128, 0.125,
        None, (-1, -1), 5.0, args["block_table"], 32, 0, None, s_aux=args.get("s_aux"),
    )  # fmt: skip
    args.update(q=args["q"][:rows], softmax_scale=0.125)
    expect_attention(**args).check(output)


# Memory and speed


def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_memory_is_bounded_at_32k_keys(kind):
    """Plain softmax attention would need 4 GiB for the scores of one head."""
    n = 32768
    q, k, v = random_batch([n], [n], 1, 1, 16, dtype=kind)
    window = packed(q, k, v, [n], [n], causal=True, window_size=(1000, 0))
    long = packed(q[:600], k, v, [600], [n], causal=True)
    for args in (window, long):
        args["out"] = np.empty_like(args["q"])
        assert peak_of(lambda args=args: flash_attn_varlen_func(**args)) < 48


def test_memory_is_bounded_for_a_large_decode_batch():
    requests = 2000
    k = np.ones((64, 16, 2, 64), np.float16)
    table = np.zeros((requests, 64), np.int32)
    q = np.ones((requests, 8, 64), np.float16)
    lengths = np.full(requests, 1024, np.int32)
    out = np.empty_like(q)
    peak = peak_of(
        lambda: flash_attn_varlen_func(
            q, k, k, 1, starts([1] * requests), 1024, seqused_k=lengths, block_table=table, out=out
        )
    )
    assert peak < 48
    assert (out == 1).all()


def plain_attention(q, k, v):
    """What a reader would write: all scores of a head at once."""
    out = np.empty_like(q)
    n, heads, dim = q.shape
    seen = np.tril(np.ones((n, n), bool))
    for head in range(heads):
        kv_head = head * k.shape[1] // heads
        score = (q[:, head] * np.float32(dim**-0.5)) @ k[:, kv_head].T
        score = np.where(seen, score, np.float32(-np.inf))
        score -= score.max(axis=1, keepdims=True)
        np.exp(score, out=score)
        score /= score.sum(axis=1, keepdims=True)
        out[:, head] = score @ v[:, kv_head]
    return out


def test_as_fast_as_plain_attention_at_2k_tokens():
    q, k, v = random_batch([2048], [2048], 4, 2)
    args = packed(q, k, v, [2048], [2048], causal=True)
    times = {"own": [], "plain": []}
    for _ in range(3):
        for name, call in (
            ("own", lambda: flash_attn_varlen_func(**args)),
            ("plain", lambda: plain_attention(q, k, v)),
        ):
            start = time.perf_counter()
            out = call()
            times[name].append(time.perf_counter() - start)
    np.testing.assert_allclose(out, flash_attn_varlen_func(**args), atol=1e-5)
    assert min(times["own"]) <= min(times["plain"])


def test_a_window_costs_what_it_sees():
    """A window of 100 keys in 32k costs little more than 100 keys do."""
    n = 32768
    q, k, v = mean_batch([1], [n], dim=64)
    narrow = packed(q, k, v, [1], [n], window_size=(99, 0))
    wide = packed(q, k, v, [1], [n])

    def fastest(args):
        def once():
            start = time.perf_counter()
            flash_attn_varlen_func(**args)
            return time.perf_counter() - start

        return min(once() for _ in range(5))

    assert fastest(narrow) * 5 < fastest(wide)
