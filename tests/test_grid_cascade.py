"""vLLM's grid of shared prefixes: 144 calls and 54 merges on a GPU, a share on NumPy.

Requests are (query tokens, keys); the first blocks of all are the same.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from batches import paged, random_batch, starts
from conftest import Path
from test_grid_merge import bounded, merged, states

from cupyflash import cascade_attention, merge_attn_states
from cupyflash.testing import DTYPES, expect_attention, merge_baseline, round_to

PAGE = 16
REPEATS = {"mixed": 1, "decode": 100}  # as many requests over the same keys, one after the other
CASES = {
    "mixed": (((129, 871), (18, 280), (37, 988), (1023, 2304), (1, 257)), 256),
    "decode": (((1, 1023), (1, 879), (1, 778), (1, 1777)), 512),
}
HEADS, DIMS, KINDS = ((4, 4), (8, 2), (16, 2)), (128, 192, 256), ("fp16", "bf16")
GRID = list(product(CASES, HEADS, DIMS, KINDS, (0.0, 50.0)))
SHARE = [("mixed", (4, 4), 128, "bf16", 50.0), ("decode", (8, 2), 192, "fp16", 0.0)]


def operands(name, heads, dim, kind):
    """q of all requests, and k and v whose requests begin alike."""
    lengths, prefix = CASES[name]
    q_lens, kv_lens = zip(*lengths, strict=True)
    batch = random_batch(q_lens * REPEATS[name], kv_lens, *heads, dim)
    q, k, v = (round_to(x, DTYPES[kind]) for x in batch)
    for operand in (k, v):
        for first in starts(kv_lens)[1:-1]:
            operand[first : first + prefix] = operand[:prefix]
    return q, k, v


def expected(name, heads, dim, kind, softcap):
    """The answer of one pass, within the error of two: each rounds its output, and the merge.

    Requests of one query over the same keys are computed as one request that is not causal.
    """
    (q, k, v), (lengths, prefix) = operands(name, heads, dim, kind), CASES[name]
    q_lens, kv_lens = zip(*lengths, strict=True)
    repeats, ends = REPEATS[name], starts(kv_lens)
    rows = np.arange(len(q)).reshape(repeats, -1).T.reshape(-1)
    own = np.concatenate([np.arange(a + prefix, b) for a, b in pairwise(ends)])
    one = {"softcap": softcap, "cu_seqlens_q": starts([n * repeats for n in q_lens])}
    one["causal"] = repeats == 1
    whole = expect_attention(q[rows], k, v, cu_seqlens_k=ends, **one)
    rest = starts([n - prefix for n in kv_lens])
    second = expect_attention(q[rows], k[own], v[own], cu_seqlens_k=rest, **one)
    one.update(cu_seqlens_q=starts([len(q)]), causal=False)
    first = expect_attention(q[rows], k[:prefix], v[:prefix], cu_seqlens_k=starts([prefix]), **one)
    low = [(part.out_baseline, part.lse_baseline) for part in (first, second)]
    both = merge_baseline(*low, out_dtype=DTYPES[kind])[0]
    back = np.argsort(rows)
    return replace(whole, out=whole.out[back], out_baseline=both[back], starts=None)


def check(path, name, heads, dim, kind, softcap, versions):
    (q, k, v), (lengths, prefix) = operands(name, heads, dim, kind), CASES[name]
    q_lens, kv_lens = zip(*lengths, strict=True)
    caches, table = paged((k, v), kv_lens, PAGE)
    # The other requests' own copies of the prefix are not to be read.
    for pages in caches:
        pages[table[1:, : prefix // PAGE]] = np.nan
    table[1:, : prefix // PAGE] = table[0, : prefix // PAGE]
    table, array = np.tile(table, (REPEATS[name], 1)), path.array
    q_lens, kv_lens = q_lens * REPEATS[name], kv_lens * REPEATS[name]
    right = expected(name, heads, dim, kind, softcap)
    for version in versions:
        output = array(np.full(q.shape, np.nan, q.dtype))
        try:
            cascade_attention(
                output, array(q), *map(array, caches), array(starts(q_lens)), max(q_lens),
                array(starts([len(q)])), array([prefix], np.int32),
                array(np.array(kv_lens) - prefix, np.int32), max(kv_lens), dim**-0.5, None, None,
                softcap, array(table), prefix, 0, version,
            )  # fmt: skip
        except ValueError as refusal:
            if version != 3 or "version 3" not in str(refusal):
                raise
            assert np.isnan(path.host(output).astype(np.float32)).all()
        else:
            right.check(path.host(output))


@pytest.mark.gpu
@pytest.mark.parametrize("point", GRID, ids=lambda point: "-".join(map(str, point)))
def test_the_grid(point):
    check(Path("gpu"), *point, versions=(2, 3))


@pytest.mark.parametrize("point", SHARE, ids=lambda point: "-".join(map(str, point)))
def test_a_share_of_the_grid_on_numpy(point):
    check(Path("numpy"), *point, versions=(None,))


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "kind"),
    list(product((1, 39, 16912), (4, 8, 16), DIMS, KINDS)),
)
def test_merges_of_its_states(large_path, tokens, heads, dim, kind):
    if large_path.name == "numpy" and tokens > 39 and (heads, dim) != (4, 128):
        tokens = 130
    xp = large_path.xp
    outs, lses = states(large_path, tokens, heads, dim, kind)
    out, lse = xp.zeros_like(outs[0]), xp.zeros_like(lses[0])
    merge_attn_states(out, outs[0], lses[0], outs[1], lses[1], lse)
    right, low = (merged(xp, outs, lses, None, each) for each in (np.float64, np.float32))
    assert bounded(xp, out, right[0], low[0], DTYPES[kind])
    assert bounded(xp, lse, right[1], low[1], np.float32)
