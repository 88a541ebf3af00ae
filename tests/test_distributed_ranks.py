"""Collectives, and ranks that fail or disagree: an error on every rank, soon."""

from __future__ import annotations

import os
import time

import ml_dtypes
import numpy as np
import pytest

from cupyflash.distributed import DisagreementError, RankLostError, Sharding
from cupyflash.distributed.local import run_processes, run_threads

RUNNERS = [run_threads, run_processes]
SIZES = (1, 2, 3, 4, 8)
TIMEOUT = 20.0


def collectives(group):
    """Every collective, with values that say who sent them."""
    rank, size = group.rank, group.size
    gathered = group.all_gather(np.full((2, 3), rank, ml_dtypes.bfloat16))
    assert gathered.dtype == ml_dtypes.bfloat16
    assert (gathered.astype(int) == np.arange(size)[:, None, None]).all()
    to = np.arange(size, dtype=np.int32)[:, None] + 100 * rank
    large = np.broadcast_to(to[..., None].astype(np.float16), (size, 1, 70_000))
    one, empty, other = group.all_to_all([to, np.zeros((size, 0, 5)), large])
    assert (one[:, 0] == rank + 100 * np.arange(size)).all()
    assert empty.shape == (size, 0, 5)
    assert (other == one[..., None].astype(np.float16)).all()
    total = group.reduce_scatter((to + np.zeros(4)).astype(np.float32))
    assert total.dtype == np.float32
    assert (total == sum(rank + 100 * other for other in range(size))).all()
    group.agree("the step", b"abc")
    return rank, size


@pytest.mark.parametrize(
    ("run", "size"), [*((run_threads, size) for size in SIZES), (run_processes, 3)]
)
def test_collectives(run, size):
    assert run(collectives, size, timeout=TIMEOUT) == [(rank, size) for rank in range(size)]


def test_sums_are_added_in_the_order_of_ranks():
    """1 + 1e8 - 1e8 in float32: 0 in this order, 1 in another."""

    def add(group):
        return float(group.reduce_scatter(np.full((3, 1), [1, 1e8, -1e8][group.rank], "f4"))[0])

    assert run_threads(add, 3) == [0.0] * 3


# Ranks that do not do the same


def another_state(group):
    group.agree("the step", b"b" if group.rank == 1 else b"a")


def another_dtype(group):
    group.all_gather(np.zeros(4, np.float32 if group.rank else np.float16))


def another_batch(group):
    group.all_to_all([np.zeros((group.size, 3 + group.rank // 2))])


def another_collective(group):
    send = np.zeros((group.size, 2), np.float32)
    return group.reduce_scatter(send) if group.rank else group.all_to_all([send])


DIFFERENT = (another_state, another_dtype, another_batch, another_collective)


@pytest.mark.parametrize(
    ("run", "function"),
    [*((run_threads, function) for function in DIFFERENT), (run_processes, another_dtype)],
)
def test_ranks_that_disagree_all_fail(run, function):
    start = time.monotonic()
    with pytest.raises(RankLostError, match="3 of 3 ranks failed") as caught:
        run(function, 3, timeout=TIMEOUT)
    assert {outcome.error for outcome in caught.value.outcomes} <= {
        *("DisagreementError", "RankLostError"),
    }
    assert "DisagreementError" in {outcome.error for outcome in caught.value.outcomes}
    assert time.monotonic() - start < TIMEOUT


def fails(group):
    if group.rank == 1:
        raise MemoryError("planted")
    group.all_gather(np.zeros(3))


def leaves(group):
    if group.rank != 1:
        group.all_gather(np.zeros(3))


def dies(group):
    if group.rank == 1:
        os._exit(7)
    group.all_gather(np.zeros(3))


def sleeps(group):
    if group.rank == 1:
        time.sleep(4)
    group.agree("the step", b"")


@pytest.mark.parametrize(
    ("run", "function", "words"),
    [
        (run_threads, fails, "rank 1 with MemoryError: planted"),
        (run_processes, fails, "rank 1 with MemoryError: planted"),
        (run_processes, leaves, "is gone"),
        (run_processes, dies, "ended with 7"),
        (run_threads, leaves, "lost the others"),
    ],
)
def test_a_rank_that_is_gone_fails_the_others(run, function, words):
    start = time.monotonic()
    limit = 2.0 if run is run_threads else TIMEOUT
    with pytest.raises(RankLostError) as caught:
        run(function, 3, timeout=limit)
    outcomes = caught.value.outcomes
    assert all(outcome.error for rank, outcome in enumerate(outcomes) if rank != 1)
    assert words in str(caught.value) + "".join(outcome.text for outcome in outcomes)
    assert time.monotonic() - start < TIMEOUT


@pytest.mark.parametrize("run", RUNNERS)
def test_a_rank_that_does_not_come_is_not_waited_for(run):
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        run(sleeps, 3, timeout=1.0)
    assert all(outcome.error == "RankLostError" for outcome in caught.value.outcomes)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda g: g.all_to_all([np.zeros((3, 2))]), ValueError, "first axis must be 1"),
        (lambda g: g.reduce_scatter(np.zeros((1, 2), np.float16)), TypeError, "float16"),
        (lambda g: g.all_gather(_Foreign()), TypeError, "NcclCommunicator"),
    ],
)
def test_arrays_that_cannot_travel_are_refused(call, error, match):
    def run(group):
        with pytest.raises(error, match=match):
            call(group)

    run_threads(run, 1)


class _Foreign:
    shape, ndim, dtype = (2,), 1, np.dtype(np.float32)


def test_a_disagreement_is_a_value_error():
    assert issubclass(DisagreementError, ValueError)
    with pytest.raises(ValueError, match="interleave_size=3 must divide block_size=16"):
        Sharding(2, 3, 16)
    with pytest.raises(ValueError, match="at least 1"):
        Sharding(0)
