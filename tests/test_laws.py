"""Laws that hold without an oracle: bitwise where an order must not matter, else within bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from batches import arguments, expected, random_batch, run
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import flash_attn_varlen_func, merge_attn_states
from cupyflash.testing import expect_merge, merge_baseline, weight_precision
from cupyflash.testing.strategies import cases

SEED = st.integers(0, 2**16)
PAGED = cases(page_size=st.sampled_from([16, 1, 4, 64]))


def same_bits(left, right):
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def supported(path, case):
    """float32 attention is NumPy's alone."""
    if path.name != "numpy" and case.q_type == "fp32":
        return case.replace(q_type="fp16", kv_type="fp16")
    return case


@given(case=PAGED, seed=SEED)
def test_order_of_the_pool_does_not_matter(path, case, seed):
    inputs = supported(path, case).make(path.xp)
    first = inputs.call(flash_attn_varlen_func)
    cache_k, cache_v = (path.host(inputs.args[name]) for name in "kv")
    order = np.random.default_rng(seed).permutation(len(cache_k))
    table = path.host(inputs.args["block_table"]).copy()
    used = table < len(order)
    table[used] = np.argsort(order)[table[used]]
    inputs.args.update(
        k=path.array(np.ascontiguousarray(cache_k[order])),
        v=path.array(np.ascontiguousarray(cache_v[order])),
        block_table=path.array(table),
    )
    assert same_bits(inputs.call(flash_attn_varlen_func), first)


@given(case=PAGED)
def test_layout_does_not_matter(path, case):
    """Bits are a kernel's: version 3 leaves rows that are not aligned to the portable ones."""
    case = supported(path, case)
    same_kernels = case.layout == "odd" and path.name != "numpy"
    options = {"fa_version": 2} if same_kernels else {}
    plain = case.replace(layout="NHD").make(path.xp).call(flash_attn_varlen_func, **options)
    assert same_bits(case.make(path.xp).call(flash_attn_varlen_func, **options), plain)
    if same_kernels:
        case.make(path.xp).check(flash_attn_varlen_func)


@given(case=cases(page_size=16, alibi=st.sampled_from(["", "head"])), seed=SEED)
def test_order_and_company_of_requests_do_not_matter(path, case, seed):
    """Every request has the same bits in any order of the batch, where it asks for that."""
    inputs = supported(path, case).make(path.xp)
    out, lse = inputs.call(flash_attn_varlen_func, batch_invariant=True)
    args = inputs.args
    order = np.random.default_rng(seed).permutation(len(case.lengths))
    starts = path.host(args["cu_seqlens_q"])
    rows = [np.arange(starts[r], starts[r + 1]) for r in order]
    index = np.concatenate([*rows, np.arange(starts[-1], len(out))])
    more = {
        "q": path.array(np.ascontiguousarray(path.host(args["q"])[index])),
        "cu_seqlens_q": path.array(np.cumsum([0, *(len(r) for r in rows)]), np.int32),
    }
    for name in ("seqused_k", "block_table", "k_descale", "v_descale"):
        if name in args:
            more[name] = path.array(np.ascontiguousarray(path.host(args[name])[order]))
    args.update(more)
    found = inputs.call(flash_attn_varlen_func, batch_invariant=True)
    assert same_bits(found, (out[index], lse[:, index]))
    inputs.check(flash_attn_varlen_func)


@given(case=cases(page_size=16, alibi=st.sampled_from(["", "head"])))
def test_a_request_alone_has_the_bits_it_has_in_company(path, case):
    inputs = supported(path, case).make(path.xp)
    out, lse = inputs.call(flash_attn_varlen_func, batch_invariant=True)
    args, starts = dict(inputs.args), path.host(inputs.args["cu_seqlens_q"])
    for request in range(len(case.lengths)):
        rows, one = slice(starts[request], starts[request + 1]), slice(request, request + 1)
        alone = {
            **args,
            "q": args["q"][rows],
            "cu_seqlens_q": path.array([0, rows.stop - rows.start], np.int32),
        }
        for name in ("seqused_k", "block_table", "k_descale", "v_descale"):
            if name in args:
                alone[name] = args[name][one]
        found = flash_attn_varlen_func(**alone, return_softmax_lse=True, batch_invariant=True)
        assert same_bits([path.host(a) for a in found], (out[rows], lse[:, rows]))


@given(case=cases(), sizes=st.tuples(*[st.sampled_from([None, 1, 4, 16, 64])] * 2))
def test_page_size_does_not_matter(path, case, sizes):
    case = supported(path, case)
    for size in sizes:
        other = case.replace(page_size=size).make(path.xp)
        precision = weight_precision(**other.args)
        case.make().expected(**precision).check(*other.call(flash_attn_varlen_func))


@given(case=cases(), num_splits=st.sampled_from([1, 2, 3, 8]))
def test_number_of_splits_does_not_matter(path, case, num_splits):
    supported(path, case).make(path.xp).check(flash_attn_varlen_func, num_splits=num_splits)


@given(case=cases(), seed=SEED)
def test_repeated_runs_have_the_same_bits(path, case, seed):
    inputs = supported(path, case).make(path.xp)
    first = inputs.call(flash_attn_varlen_func)
    assert same_bits(inputs.call(flash_attn_varlen_func), first)


KV = {"q_len": st.integers(1, 20), "kv_len": st.integers(1, 300), "at": st.floats(0, 1)}


@given(**KV, seed=SEED)
def test_keys_split_anywhere_and_merged_equal_the_whole(path, q_len, kv_len, at, seed):
    """Softmax over a union of key sets is the merge of the softmaxes."""
    cut = round(at * kv_len)
    dtype = np.float32 if path.name == "numpy" else np.float16
    q, k, v = random_batch([q_len], [kv_len], 4, 2, dtype=dtype, seed=seed)
    states, low = [], []
    for part in (slice(0, cut), slice(cut, kv_len)):
        args = arguments(path, q, k[part], v[part], [q_len], [len(k[part])])
        out, lse = run(path, args)
        states.append((path.array(out, dtype), path.array(lse, np.float32)))
        piece = expected(path, args)
        low.append((piece.out_baseline, piece.lse_baseline))
    merged = path.array(np.full(q.shape, np.nan, dtype))
    lse = path.array(np.full((4, q_len), np.nan, np.float32))
    merge_attn_states(merged, *states[0], *states[1], lse)
    right = expected(path, arguments(path, q, k, v, [q_len], [kv_len]))
    out_low, lse_low = merge_baseline(*low, out_dtype=dtype)
    right = replace(right, out_baseline=out_low, lse_baseline=lse_low)
    right.check(path.host(merged), path.host(lse))


@given(**KV, shift=st.sampled_from([-3.0, 0.5, 16.0]))
def test_a_constant_added_to_every_value_is_added_to_every_output(path, q_len, kv_len, at, shift):
    del at
    dtype = np.float32 if path.name == "numpy" else np.float16
    q, k, v = random_batch([q_len], [kv_len], 2, 1, dtype=dtype)
    v = (v * 16).round() / 16  # so that the sum is exact
    plain = expected(path, arguments(path, q, k, v, [q_len], [kv_len]))
    args = arguments(path, q, k, (v + shift).astype(dtype), [q_len], [kv_len])
    out, lse = run(path, args)
    right = replace(expected(path, args), out=plain.out + shift)
    right.check(out.astype(dtype), lse.astype(np.float32))


# Merge algebra


def states(seed, count):
    rng = np.random.default_rng(seed)
    return [
        (
            rng.standard_normal((5, 3, 64)).astype(np.float32),
            rng.uniform(-30, 30, (3, 5)).astype(np.float32),
        )
        for _ in range(count)
    ]


def merge(path, first, second):
    out = path.array(np.full((5, 3, 64), np.nan, np.float32))
    lse = path.array(np.full((3, 5), np.nan, np.float32))
    operands = [path.array(array) for array in (*first, *second)]
    merge_attn_states(out, *operands, lse)
    return path.host(out), path.host(lse)


@given(seed=SEED)
def test_merge_is_commutative(merge_path, seed):
    first, second = states(seed, 2)
    right = expect_merge(first, second, out_dtype="fp32")
    right.check(*merge(merge_path, first, second))
    right.check(*merge(merge_path, second, first))


@given(seed=SEED)
def test_zero_and_minus_infinity_are_neutral(merge_path, seed):
    (some,) = states(seed, 1)
    neutral = (np.zeros_like(some[0]), np.full_like(some[1], -np.inf))
    assert same_bits(merge(merge_path, some, neutral), some)
    assert same_bits(merge(merge_path, neutral, some), some)


@given(seed=SEED)
def test_merge_is_associative(merge_path, seed):
    a, b, c = states(seed, 3)
    right = expect_merge(a, b, c, out_dtype="fp32")
    for first, second in (((a, b), c), (a, (b, c))):
        found, low = (
            nested(combine, first, second)
            for combine in (lambda x, y: merge(merge_path, x, y), merge_low)
        )
        two = replace(right, out_baseline=low[0], lse_baseline=low[1])
        replace(two, out_floor=2 * right.out_floor, lse_floor=2 * right.lse_floor).check(*found)


def merge_low(first, second):
    return merge_baseline(first, second, out_dtype=np.float32)


def nested(combine, first, second):
    """combine(first, second), where the pair that is itself two states is combined before."""
    pairs = (combine(*s) if isinstance(s[0], tuple) else s for s in (first, second))
    return combine(*pairs)


@pytest.mark.parametrize("lse", [0.0, -80.0, 700.0])
def test_a_state_merged_with_itself_is_itself_twice(merge_path, lse):
    out = np.random.default_rng(1).standard_normal((5, 3, 64)).astype(np.float32)
    state = (out, np.full((3, 5), lse, np.float32))
    merged, total = merge(merge_path, state, state)
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_allclose(total, lse + np.log(2), rtol=2e-7)
