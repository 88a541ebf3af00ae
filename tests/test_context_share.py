"""One rank's share of each sequence in a call: masks count positions in the whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
from batches import paged, random_batch, starts
from hypothesis import assume, given
from hypothesis import strategies as st

from cupyflash import flash_attn_varlen_func, merge_attn_states
from cupyflash.testing import attention_oracle, expect_attention, merge_oracle


def share_call(q, k, v, q_lens, kv_lens, size, rank, page_size=None, **options):
    """The call of one rank, which has every ``size``-th key from key ``rank`` on."""
    first, kept = starts(kv_lens), []
    for begin, n in zip(first, kv_lens, strict=False):
        kept.append(begin + np.arange(rank, n, size))
    rows, lengths = np.concatenate(kept), [len(own) for own in kept]
    args = {
        "max_seqlen_q": max(q_lens), "cu_seqlens_q": starts(q_lens),
        "max_seqlen_k": max(lengths), "cp_world_size": size, "cp_rank": rank,
        "cp_tot_seqused_k": np.array(kv_lens, np.int32) if size > 1 else None,
        "return_softmax_lse": True, **options,
    }  # fmt: skip
    if page_size is None:
        return {"q": q, "k": k[rows], "v": v[rows], "cu_seqlens_k": starts(lengths), **args}
    caches, table = paged((k[rows], v[rows]), lengths, page_size)
    args.update(block_table=table, seqused_k=np.array(lengths, np.int32))
    return {"q": q, "k": caches[0], "v": caches[1], **args}


def states(q, k, v, q_lens, kv_lens, size, **options):
    return [
        flash_attn_varlen_func(**share_call(q, k, v, q_lens, kv_lens, size, rank, **options))
        for rank in range(size)
    ]


masks = st.sampled_from(
    [{}, {"causal": True}, {"causal": True, "window_size": (9, 0)}, {"window_size": (4, 3)}]
)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 3, 4, 8]),
    mask=masks,
    sink=st.booleans(),
    alibi=st.booleans(),
    softcap=st.sampled_from([0.0, 5.0]),
    page_size=st.sampled_from([None, 4, 16]),
    seed=st.integers(0, 99),
)
def test_the_states_of_all_ranks_are_the_whole(
    lengths, size, mask, sink, alibi, softcap, page_size, seed
):
    q_lens, kv_lens = zip(*lengths, strict=True)
    assume(sum(q_lens))
    q, k, v = random_batch(q_lens, kv_lens, 4, 2, 32, seed=seed)
    rng, options = np.random.default_rng(seed), {**mask, "softcap": softcap}
    options["s_aux"] = rng.standard_normal(4).astype(np.float32) if sink else None
    options["alibi_slopes"] = rng.uniform(0, 0.5, 4).astype(np.float32) if alibi else None
    found = states(q, k, v, q_lens, kv_lens, size, page_size=page_size, **options)
    whole = expect_attention(
        q, k, v, cu_seqlens_q=starts(q_lens), cu_seqlens_k=starts(kv_lens), **options
    )
    out, lse = merge_oracle(*found)
    whole.check(out.astype(np.float32), lse.astype(np.float32))


# World sizes, ranks, and how many keys more the whole has than the next multiple.
@pytest.mark.parametrize(("size", "rank", "more"), [(8, 0, 1), (8, 7, 0), (4, 3, 2), (2, 0, 0)])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("window", [(-1, -1), (7, -1), (0, 0)])
def test_each_row_sees_its_keys_of_the_share(size, rank, more, page_size, window):
    """Row by row, over exactly the keys that it sees, without any mask."""
    q_lens, kv_lens = [5, 3], [32 + more, 3]
    q, k, v = random_batch(q_lens, kv_lens, 2, 1, 32)
    options = {"causal": True, "window_size": window, "page_size": page_size}
    out, lse = flash_attn_varlen_func(**share_call(q, k, v, q_lens, kv_lens, size, rank, **options))
    for request, (first, begin) in enumerate(zip(starts(q_lens), starts(kv_lens), strict=True)):
        if request == len(q_lens):
            break
        total = kv_lens[request]
        for row in range(q_lens[request]):
            position = total - q_lens[request] + row
            seen = np.arange(rank, total, size)
            seen = seen[seen <= position]
            if window[0] >= 0:
                seen = seen[seen >= position - window[0]]
            right = attention_oracle(q[first + row][None], k[begin + seen], v[begin + seen])
            np.testing.assert_allclose(out[first + row], right[0][0], atol=1e-6)
            np.testing.assert_allclose(lse[:, first + row], right[1][:, 0], atol=1e-6)


# B26: four queries, the second to last ends at 12 of 13 tokens: 8 and 4 on two ranks would be its
# keys with an interleave of 4; dealt one by one they are 6 and 6, and 7 and 6 for the last one.
def test_b26_boundaries_are_each_tokens_own():
    q_lens, kv_lens = [4], [13]
    q = np.zeros((4, 1, 32), np.float32)
    k = v = np.ones((13, 1, 32), np.float32)
    lses = [lse for _, lse in states(q, k, v, q_lens, kv_lens, 2, causal=True)]
    counts = np.rint(np.exp(lses)).astype(int)[:, 0]
    assert counts.tolist() == [[5, 6, 6, 7], [5, 5, 6, 6]]


def test_a_share_that_is_longer_than_its_sequence_is_cut():
    """A length that counts keys of nobody: what lies behind the whole's end is not seen."""
    q, k, v = random_batch([1], [12])
    args = share_call(q, k, v, [1], [12], 2, 0)
    v[8:] = np.nan
    args.update(cp_tot_seqused_k=np.array([7], np.int32), v=v[0::2], k=k[0::2])
    out, lse = flash_attn_varlen_func(**args)
    right = attention_oracle(q, k[0:7:2], v[0:7:2])
    np.testing.assert_allclose(out, right[0], atol=1e-6)
    np.testing.assert_allclose(lse, right[1], atol=1e-6)


def test_an_empty_share_is_the_empty_state():
    q, k, v = random_batch([1], [2])
    (out, lse), (other, other_lse) = states(q, k, v, [1], [2], 3)[1:]
    assert (other == 0).all()
    assert np.isneginf(other_lse).all()
    merged = np.empty_like(out)
    merge_attn_states(merged, out, lse, other, other_lse)
    assert merged.tobytes() == out.tobytes()


def test_a_sink_is_on_rank_0():
    q, k, v = random_batch([2], [6], 2, 1)
    sink = np.array([3.0, -1.0], np.float32)
    plain, with_sink = (states(q, k, v, [2], [6], 2, s_aux=s) for s in (None, sink))
    assert plain[1][1].tobytes() == with_sink[1][1].tobytes()
    np.testing.assert_allclose(with_sink[0][1], np.logaddexp(plain[0][1], sink[:, None]), rtol=1e-6)


@pytest.mark.parametrize(
    ("totals", "error", "match"),
    [
        (np.ones(2, np.int32), ValueError, "cp_tot_seqused_k"),
        (np.ones(1, np.int64), TypeError, "int32"),
        (np.array([-1], np.int32), ValueError, "negative"),
    ],
)
def test_lengths_that_cannot_be(totals, error, match):
    q, k, v = random_batch([1], [4])
    args = share_call(q, k, v, [1], [4], 2, 0, out=np.full_like(q, 7))
    with pytest.raises(error, match=match):
        flash_attn_varlen_func(**{**args, "cp_tot_seqused_k": totals})
    assert (args["out"] == 7).all()


def test_kernels_refuse_a_share(path):
    if path.name == "numpy":
        return
    q, k, v = (x.astype(np.float16) for x in random_batch([1], [4]))
    args = share_call(q, k, v, [1], [4], 2, 0)
    args = {n: path.array(a) if isinstance(a, np.ndarray) else a for n, a in args.items()}
    with pytest.raises(NotImplementedError, match="cp_world_size=2: kernels do not mask"):
        flash_attn_varlen_func(**args)
