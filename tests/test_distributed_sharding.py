"""Which rank holds which token, and what a step moves, for 1 to 64 ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Case, run_step

from cupyflash.distributed import Sharding
from cupyflash.distributed.local import run_threads
from cupyflash.distributed.plan import Transfer, step_transfers

sharding = st.builds(
    lambda size, every, runs: Sharding(size, every, every * runs),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 16]),
    st.integers(1, 4),
)


@given(sharding, st.integers(0, 400))
def test_every_token_lies_on_one_rank_in_order(dealt, length):
    position = np.arange(length)
    owner, local = dealt.owner(position), dealt.local_index(position)
    lengths = dealt.local_lengths(np.array([length], np.int32))[0]
    assert lengths.sum() == length
    for rank in range(dealt.size):
        own = position[owner == rank]
        assert len(own) == lengths[rank] <= dealt.max_local_length(length)
        assert local[own].tolist() == list(range(len(own)))
        assert dealt.position(rank, np.arange(len(own))).tolist() == own.tolist()


# The formulas of an engine that indexes by virtual blocks of size * block_size tokens.
@given(sharding, st.integers(0, 300), st.integers(0, 8))
def test_slots_are_those_of_virtual_blocks(dealt, length, seed):
    size, every, block = dealt.size, dealt.interleave_size, dealt.block_size
    position = np.arange(length)
    columns = -(-length // (size * block)) or 1
    table = np.random.default_rng(seed).permutation(columns)[None].astype(np.int32)
    for rank in range(size):
        found = dealt.slot_mapping(rank, table, np.zeros(length, int), position)
        offset = position % (size * block)
        right = table[0, position // (size * block)] * block
        right = right + offset // (size * every) * every + offset % every
        right = np.where(offset // every % size == rank, right, -1)
        assert found.dtype == np.int64
        assert found.tolist() == right.tolist()


@pytest.mark.parametrize(
    ("every", "slots"),
    [
        (1, [[16, -1, 17, -1, 18, -1], [-1, 16, -1, 17, -1, 18]]),
        (2, [[16, 17, -1, -1, 18, 19], [-1, -1, 16, 17, -1, -1]]),
        (4, [[16, 17, 18, 19, -1, -1], [-1, -1, -1, -1, 16, 17]]),
    ],
)
def test_literal_slots(every, slots):
    """Two ranks, blocks of 16, block 1: the first six tokens of a request."""
    dealt, table = Sharding(2, every, 16), np.array([[1]], np.int32)
    for rank, right in enumerate(slots):
        found = dealt.slot_mapping(rank, table, np.zeros(6, int), np.arange(6))
        assert found.tolist() == right


def test_another_ranks_token_needs_no_column():
    """Token 16 of one rank's two blocks: the other rank's row may end before."""
    dealt, table = Sharding(2, 16, 16), np.array([[3]], np.int32)
    assert dealt.slot_mapping(0, table, np.array([0]), np.array([20])).tolist() == [-1]
    assert dealt.slot_mapping(1, table, np.array([0]), np.array([20])).tolist() == [52]


# What a step moves


def sent(group, case):
    run_step(group, case)
    return group.sent


@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("combine", ["auto", "a2a", "ag", "ag_rs"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_step_moves_what_its_plan_says(size, combine, dtype):
    """All ranks run as threads, and every message is looked at."""
    case = Case(((1, 200), (2, 70), (1, 1)), combine=combine, dtype=dtype, head_dim=16)
    moved = [
        Transfer(what, rank, peer, nbytes)
        for rank, messages in enumerate(run_threads(sent, size, case))
        for what, peer, nbytes in messages
    ]
    itemsize = 2 if dtype == "fp16" else 4
    planned = list(step_transfers(size, 4, 2, 16, itemsize, combine))
    assert sorted(moved) == sorted(planned)
    for rank in range(size):
        going = sum(t.nbytes for t in planned if t.source == rank)
        coming = sum(t.nbytes for t in planned if t.target == rank)
        assert going == coming
    if size == 1:
        assert not planned


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("every", [1, 16])
def test_shares_are_even(size, every):
    dealt = Sharding(size, every, 16)
    for length in (131072, 131073, 1_000_000):
        shares = dealt.local_lengths(np.array([length], np.int32))[0]
        assert shares.sum() == length
        assert shares.max() - shares.min() <= every
