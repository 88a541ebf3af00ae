"""Public reports on merging states and on cascade; docs/public_reports.md names them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from batches import (
    arguments,
    attend,
    check,
    expected,
    mean_batch,
    random_batch,
    rounding,
    run,
    starts,
)

from cupyflash import (
    cascade_attention,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    merge_attn_states,
)
from cupyflash.testing import merge_oracle


def merged(path, prefix, suffix, alias=False):
    arrays = [path.array(array, np.float32) for array in (*prefix, *suffix)]
    out = arrays[0] if alias else path.array(np.full(prefix[0].shape, np.nan, np.float32))
    lse = arrays[1] if alias else path.array(np.full(prefix[1].shape, np.nan, np.float32))
    merge_attn_states(out, *arrays, lse)
    return path.host(out), path.host(lse)


@pytest.mark.parametrize("alias", [False, True])
def test_b17_all_states_empty(merge_path, alias):
    empty = (np.zeros((4, 2, 64)), np.full((2, 4), -np.inf))
    two = merged(merge_path, empty, empty, alias)
    four = merged(merge_path, two, merged(merge_path, empty, empty), alias)
    for out, lse in (two, four):
        assert (out == 0).all()
        assert np.isneginf(lse).all()


def test_b19_an_empty_side_may_hold_nan(merge_path):
    prefix = (np.full((1, 1, 64), np.nan), np.full((1, 1), -np.inf))
    suffix = (np.full((1, 1, 64), 2.0), np.full((1, 1), 1.5))
    for pair in ((prefix, suffix), (suffix, prefix)):
        out, lse = merged(merge_path, *pair)
        assert (out == 2).all()
        assert (lse == 1.5).all()


def test_b20_lse_is_natural(merge_path):
    prefix = (np.zeros((1, 1, 64)), np.log([[2.0]]))
    suffix = (np.ones((1, 1, 64)), np.log([[8.0]]))
    out, lse = merged(merge_path, prefix, suffix)
    np.testing.assert_allclose(out, 0.8, rtol=1e-6)
    np.testing.assert_allclose(lse, 2.302585, rtol=1e-6)


@pytest.mark.parametrize("num_splits", [2, 8])
def test_b22_lse_of_packed_single_tokens_is_head_then_token(path, num_splits):
    kv_lens = [5, 70, 200]
    q, k, v = mean_batch([1] * 3, kv_lens, 16, 2)
    args = arguments(path, q, k, v, [1] * 3, kv_lens, 16, num_splits=num_splits)
    out, lse = check(path, args)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(kv_lens), (16, 3)), rtol=1e-6)
    first = starts(kv_lens)
    halves = []
    for take in (lambda n: slice(0, n // 2), lambda n: slice(n // 2, n)):
        rows = np.concatenate([first[i] + np.arange(n)[take(n)] for i, n in enumerate(kv_lens)])
        sizes = [len(range(n)[take(n)]) for n in kv_lens]
        halves.append(
            run(path, arguments(path, q, k[rows], v[rows], [1] * 3, sizes, num_splits=num_splits))
        )
    whole = merge_oracle(*halves)
    np.testing.assert_allclose(whole[0], out, rtol=1e-6)
    np.testing.assert_allclose(whole[1], lse, rtol=1e-6)


def shared_prefix(path, window=(-1, -1)):
    """A prefix of 40 tokens, a suffix of 8 query tokens, v[j] = j, pages of 8."""
    args = arguments(path, *mean_batch([8], [48], 1, 1), [8], [48], 8)
    out = path.array(np.full((8, 1, 64), np.nan, args["q"].dtype))
    call = (
        out, args["q"], args["k"], args["v"], args["cu_seqlens_q"], 8,
        path.array(starts([8])), path.array([40], np.int32), path.array([8], np.int32), 48, 0.125,
        None, window, 0.0, args["block_table"], 40, 0, None,
    )  # fmt: skip
    return args, out, call


def test_b23_cascade_with_a_window(path):
    _, out, call = shared_prefix(path, window=(15, 0))
    cascade_attention(*call)
    np.testing.assert_allclose(path.host(out)[:, 0, 0], 32.5 + np.arange(8), rtol=1e-6)


def test_b23_attention_with_a_window(path):
    args, _, _ = shared_prefix(path)
    found, lse = run(path, {**args, "window_size": (15, 0), "causal": True})
    np.testing.assert_allclose(found[:, 0, 0], 32.5 + np.arange(8), rtol=1e-6)
    np.testing.assert_allclose(lse[0], 2.772589, rtol=1e-6)


def test_b23_cascade_without_a_window(path):
    _, out, call = shared_prefix(path)
    cascade_attention(*call)
    np.testing.assert_allclose(path.host(out)[:, 0, 0], 20 + np.arange(8) / 2, rtol=1e-6)


def test_b25_a_schedule_for_another_split_count_is_refused(path):
    args = arguments(path, *random_batch([1, 1], [40, 50]), [1, 1], [40, 50], 16)
    made = get_scheduler_metadata(
        2, 1, 50, 1, 1, 64, args["seqused_k"], args["q"].dtype, page_size=16, num_splits=4
    )
    right = run(path, args)
    same = flash_attn_varlen_func(**args, scheduler_metadata=made, num_splits=4)
    np.testing.assert_array_equal(path.host(same), right[0])
    with pytest.raises(ValueError, match="num_splits"):
        flash_attn_varlen_func(**args, scheduler_metadata=made, num_splits=8)
    with pytest.raises(ValueError, match="max_seqlen_k"):
        flash_attn_varlen_func(
            **{**args, "max_seqlen_k": 64}, scheduler_metadata=made, num_splits=4
        )


@pytest.mark.parametrize(
    ("ranks", "interleave", "kv_len", "owned"), [(2, 1, 5, [3, 2]), (2, 4, 13, [8, 5])]
)
def test_b26_states_of_interleaved_ranks_merge_to_the_whole(path, ranks, interleave, kv_len, owned):
    q, k, v = random_batch([1], [kv_len], 4, 2)
    rank = np.arange(kv_len) // interleave % ranks
    assert [int((rank == r).sum()) for r in range(ranks)] == owned
    states = [attend(path, q, k[rank == r], v[rank == r], [1], [owned[r]]) for r in range(ranks)]
    out, lse = merge_oracle(*states)
    whole = attend(path, q, k, v, [1], [kv_len])
    # Each state is stored once: a rank's share of the weights times its rounding, and the whole's.
    atol = 2e-6 if path.name == "numpy" else 2 * rounding(path) * np.abs(v).max()
    np.testing.assert_allclose(out, whole[0], atol=atol)
    np.testing.assert_allclose(lse, whole[1], atol=2e-6)


def test_b22_merging_prefix_and_suffix_of_a_decode_batch(path):
    """The cascade of one shared page equals one pass, whatever the suffix lengths."""
    kv_lens = [20, 86, 216]
    q, k, v = random_batch([1] * 3, kv_lens, 16, 2)
    first = starts(kv_lens)
    for request in (1, 2):
        for operand in (k, v):
            operand[first[request] : first[request] + 16] = operand[:16]
    args = arguments(path, q, k, v, [1] * 3, kv_lens, 16)
    out = path.array(np.full(q.shape, np.nan, args["q"].dtype))
    table = path.host(args["block_table"]).copy()
    table[:, 0] = table[0, 0]
    cascade_attention(
        out, args["q"], args["k"], args["v"], args["cu_seqlens_q"], 1, path.array(starts([3])),
        path.array([16], np.int32), path.array(np.array(kv_lens) - 16, np.int32), 216,
        1 / math.sqrt(64), None, (-1, -1), 0.0, path.array(table), 16, 2, None,
    )  # fmt: skip
    expected(path, args).check(path.host(out))
