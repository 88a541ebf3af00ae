"""Latent caches written and gathered, and prefill over chunks of a context."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.latent_cache import concat_and_cache_mla, gather_latent_cache
from cupyflash.mla import ContextChunk, mla_prefill
from cupyflash.testing import expect_attention, write_oracle
from cupyflash.testing.requests import to_numpy

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = {"auto": BF16, "fp8_e4m3": np.dtype(np.uint8)}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("page", [16, 64])
def test_concat_and_cache(write_path, kind, rank, page):
    rng = np.random.default_rng(page)
    latent = rng.standard_normal((9, 512)).astype(BF16)
    rope = rng.standard_normal((9, 1, 64)).astype(BF16)
    cache = rng.integers(0, 100, (4, page, 1, 576)).astype(TYPES[kind])
    slots = np.array([3, -1, page, 4 * page - 1, 17, 2, -1], np.int64)
    scale = 0.5 if kind != "auto" else 1.0
    right = write_oracle(np.concatenate([latent[:, None], rope], -1), cache, slots, scale)
    found = write_path.array(cache)
    concat_and_cache_mla(
        write_path.array(latent), write_path.array(rope if rank == 4 else rope[:, 0]),
        found if rank == 4 else found[:, :, 0], write_path.array(slots), kind, scale,
    )  # fmt: skip
    assert to_numpy(found).tobytes() == right.tobytes()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((3, 1, 512), (3, 64), (2, 16, 576)), r"kv_c has shape .* \[tokens, latent\]"),
        (((3, 512), (3, 64), (2, 16, 2, 576)), "must be .num_blocks, block_size, 1, latent"),
        (((3, 512), (3, 64), (2, 16, 512)), "the latent part alone has 512"),
        (((3, 512), (3, 32), (2, 16, 576)), r"\[Hk, D\] is"),
    ],
)
def test_concat_and_cache_refuses(shapes, words):
    latent, rope, cache = (np.zeros(shape, np.float16) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        concat_and_cache_mla(latent, rope, cache, np.arange(3), "auto", 1.0)
    assert not cache.any()


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page=st.sampled_from([16, 1, 64]),
    seed=st.integers(0, 99),
)
def test_gather_takes_rows_from_any_start(lengths, page, seed):
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, 30, len(lengths)).astype(np.int32)
    columns = -(-int((begins + lengths).max()) // page) + 1
    table = rng.permutation(len(lengths) * columns).reshape(len(lengths), columns)
    cache = rng.standard_normal((table.size, page, 1, 24)).astype(np.float16)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    found = gather_latent_cache(cache, table.astype(np.int32), starts, int(starts[-1]), begins)
    for i, count in enumerate(lengths):
        token = np.arange(begins[i], begins[i] + count)
        right = cache[table[i, token // page], token % page, 0]
        assert found[starts[i] : starts[i + 1]].tobytes() == right.tobytes()


def prefill_case(q_lens, contexts, dtype, seed=0, heads=4):
    rng = np.random.default_rng(seed)
    dims = {"q": 192, "k": 192, "v": 128}
    q = rng.standard_normal((sum(q_lens), heads, 192)).astype(dtype)
    keys = [c + n for c, n in zip(contexts, q_lens, strict=True)]
    k, v = ([rng.standard_normal((n, heads, dims[name])).astype(dtype) for n in keys]
            for name in "kv")  # fmt: skip
    return q, k, v


def starts(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("chunk", [None, 64, 20])
def test_prefill_over_chunks_of_a_context(path, dtype, chunk):
    """Any cut of the context gives the same as one call over everything."""
    q_lens, contexts = (5, 33, 1, 7), (130, 0, 64, 21)
    q, k, v = prefill_case(q_lens, contexts, dtype)
    kv_lens = [len(each) for each in k]
    scale = 192**-0.5
    expected = expect_attention(
        q, np.concatenate(k), np.concatenate(v), max(q_lens), starts(q_lens), max(kv_lens),
        starts(kv_lens), softmax_scale=scale, causal=True,
    )  # fmt: skip

    def part(operand, begin, end):
        cut = [operand[i][min(begin, c) : min(end, c)] for i, c in enumerate(contexts)]
        return path.array(np.concatenate(cut)), [len(each) for each in cut]

    def chunks():
        size = chunk or max(contexts)
        for begin in range(0, max(contexts), size):
            some_k, lengths = part(k, begin, begin + size)
            some_v, _ = part(v, begin, begin + size)
            yield ContextChunk(some_k, some_v, path.array(starts(lengths)), size)

    new = [np.concatenate([e[c:] for e, c in zip(each, contexts, strict=True)]) for each in (k, v)]
    out, lse = mla_prefill(
        path.array(q), *map(path.array, new), path.array(starts(q_lens)), max(q_lens),
        softmax_scale=scale, contexts=chunks(), return_softmax_lse=True,
    )  # fmt: skip
    expected.check(to_numpy(out), to_numpy(lse))


def test_prefill_without_context_is_one_call(path):
    q, k, v = prefill_case((9, 3), (0, 0), np.dtype(np.float16))
    cu = path.array(starts((9, 3)))
    given = [path.array(np.concatenate(each) if isinstance(each, list) else each)
             for each in (q, k, v)]  # fmt: skip
    place = path.array(np.full((12, 4, 128), np.nan, np.float16))
    out = mla_prefill(*given, cu, 9, softmax_scale=0.07, out=place)
    right = expect_attention(
        q, np.concatenate(k), np.concatenate(v), 9, starts((9, 3)), 9, starts((9, 3)),
        softmax_scale=0.07, causal=True,
    )  # fmt: skip
    right.check(to_numpy(out))
    assert to_numpy(place).tobytes() == to_numpy(out).tobytes()
