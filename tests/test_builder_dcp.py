"""Decode context parallelism: what a rank holds of each request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_cases import Case
from steps import GRAPHS, Made, address

from cupyflash.distributed import Sharding

DECODE = Case(((1, 40), (1, 16), (1, 70)), num_kv_heads=2, group_size=2)


def step(step_path, case=DECODE, **config):
    return Made(step_path, case, **config)


# B26: rank-local lengths.
@pytest.mark.parametrize(
    ("ranks", "interleave", "length", "local"),
    [(2, 1, 5, [3, 2]), (2, 4, 13, [8, 5]), (2, 4, 12, [8, 4]), (3, 2, 0, [0, 0, 0])],
)
def test_lengths_on_each_rank(step_path, ranks, interleave, length, local):
    lengths, sharding = step_path.array([length], np.int32), Sharding(ranks, interleave)
    found = sharding.local_lengths(lengths)
    assert step_path.host(found).tolist() == [local]
    for rank, expected in enumerate(local):
        one = sharding.local_lengths(lengths, rank)
        assert one.dtype == np.int32
        assert step_path.host(one).tolist() == [expected]


@given(
    length=st.integers(0, 300), ranks=st.integers(1, 9), interleave=st.sampled_from([1, 2, 3, 16])
)
def test_tokens_are_dealt_in_runs(length, ranks, interleave):
    owner = np.arange(length) // interleave % ranks
    sharding = Sharding(ranks, interleave, 48)
    found = sharding.local_lengths(np.array([length], np.int32))[0]
    assert found.tolist() == np.bincount(owner, minlength=ranks).tolist()
    assert found.max() <= sharding.max_local_length(length)


def test_a_rank_gets_its_share_of_every_context(step_path):
    config = {"dcp_world_size": 2, "dcp_rank": 1, "cp_kv_cache_interleave_size": 4}
    case = DECODE.replace(lengths=((1, 13), (2, 12), (1, 0)), pad_reqs=1)
    made = step(step_path, case, **config, **GRAPHS)
    metadata = made.builder.build(0, made.common)
    assert step_path.host(metadata.dcp_context_kv_lens).tolist() == [5, 4, 0, 0]
    assert metadata.max_dcp_context_kv_len == 12  # ceil((14 + 5) / 8) * 4
    bounds = metadata.scheduler_metadata.bounds
    assert (bounds.num_heads_q, bounds.max_seqlen_k, bounds.window_right) == (8, 12, -1)
    again = made.builder.build(0, made.common)
    one, two = (m.dcp_context_kv_lens for m in (metadata, again))
    assert address(step_path, one) == address(step_path, two)


def test_without_a_context_there_is_nothing_to_gather(step_path):
    made = step(step_path, DECODE.replace(lengths=((3, 0), (2, 0))), dcp_world_size=2)
    metadata = made.builder.build(0, made.common)
    assert metadata.max_dcp_context_kv_len == 0
    assert metadata.scheduler_metadata is None
