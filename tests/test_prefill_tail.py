"""Which prefills have their last tiles cut into pieces, and into how many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.bounds import AttentionBounds
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.prefill_plan import make_prefill_plan, prefill_plans
from cupyflash.runtime.prefill_tail import NO_TAIL

H200 = DeviceInfo("H200", 0, (9, 0), 132, 227 << 10)
FULL = {"batch_size": 1, "max_seqlen_q": 16384, "max_seqlen_k": 16384, "num_heads_q": 16,
        "num_heads_kv": 16, "headdim": 128, "kv_dtype": "fp8"}  # fmt: skip
LAST_EIGHT = {**FULL, "max_seqlen_q": 1792, "max_seqlen_k": 8192, "num_heads_q": 10,
              "num_heads_kv": 10}  # fmt: skip


def problem_of(given, **changes):
    problem = AttentionBounds(**{**given, **changes}).problem()
    return replace(problem, q_type=problem.kv_type)


def plan_of(given, limit=None, skipped=0, **changes):
    return make_prefill_plan(problem_of(given, **changes), H200, limit, skipped)


def test_the_half_filled_round_of_a_long_request_is_cut():
    plan = plan_of(FULL)
    assert plan.tail.whole == 15 * 132
    assert plan.tail.cut > 2
    assert plan.numbers[0] == 1980 + 68 * plan.tail.cut
    assert plan.combine is None


@pytest.mark.parametrize(
    "changes",
    [{"causal": True}, {"num_splits": 1}, {"batch_invariant": True}, {"headdim": 256},
     {"headdim": 64, "softcap": 5.0, "max_seqlen_q": 1792, "num_heads_q": 10, "num_heads_kv": 10},
     {"window_size": (300, 0)}, {"total_q": 9000, "batch_size": 2, "max_seqlen_q": 8000},
     {"max_seqlen_k": 600}, {"batch_size": 33, "max_seqlen_q": 512}],
)  # fmt: skip
def test_what_is_left_whole(changes):
    assert plan_of(FULL, **changes).tail == NO_TAIL


def test_keys_before_the_queries_make_causal_tiles_alike():
    chunk = {**FULL, "max_seqlen_q": 512, "batch_size": 4, "num_heads_q": 28, "num_heads_kv": 4,
             "causal": True, "page_size": 16}  # fmt: skip
    assert plan_of(chunk, max_seqlen_k=8192).tail.whole == 3 * 132
    assert plan_of(chunk, max_seqlen_k=1024).tail == NO_TAIL


def test_a_batch_beside_decode_steps_is_left_whole():
    assert plan_of(LAST_EIGHT).tail != NO_TAIL
    assert plan_of(LAST_EIGHT, skipped=16).tail == NO_TAIL


@pytest.mark.parametrize("limit", [0, 100_000, 1_000_000, 3_000_000, 1 << 24])
def test_pieces_fit_the_workspace_that_is_given(limit):
    plan = plan_of(LAST_EIGHT, limit)
    assert plan.attend.workspace_bytes <= max(limit, 4 * 140)
    assert (plan.tail == NO_TAIL) == (limit < 1_200_000)


def rounds(plan, tiles, keys):
    """Until all blocks are done, in keys, if nothing but these took time."""
    left = max(0, tiles - plan.tail.whole)
    piece = -(-keys // (plan.tail.cut * 128)) * 128
    return -(-(tiles - left) // 132) * keys + -(-left * plan.tail.cut // 132) * piece


@given(
    heads=st.integers(1, 64),
    blocks=st.integers(1, 40),
    keys=st.integers(64, 40000),
    head_dim=st.sampled_from([64, 128]),
)
def test_pieces_are_never_slower_nor_small_nor_many(heads, blocks, keys, head_dim):
    rows = 192 if head_dim == 64 else 128
    changes = {"num_heads_q": heads, "num_heads_kv": heads, "max_seqlen_q": blocks * rows,
               "max_seqlen_k": keys, "headdim": head_dim}  # fmt: skip
    plan, tiles = plan_of(FULL, **changes), heads * blocks
    if plan.tail == NO_TAIL:
        return
    assert rounds(plan, tiles, keys) < -(-tiles // 132) * keys
    assert keys // plan.tail.cut >= 512
    assert (tiles - plan.tail.whole) * plan.tail.cut <= 4 * 132
    inverse = plan.tail.inverse
    for n in (0, 1, plan.tail.cut, 4 * 132, (1 << 24) - 1):
        assert n * inverse >> 32 == n // plan.tail.cut


def test_the_workspace_of_bounds_is_enough_for_calls_that_are_cut():
    enough = max(p.workspace_bytes for p in prefill_plans(problem_of(FULL), H200))
    for tokens in (1792, 4000, 9000, 16384):
        for keys in (2048, 8192, 16384):
            plan = plan_of(FULL, max_seqlen_q=tokens, max_seqlen_k=keys)
            assert plan.attend.workspace_bytes <= enough
