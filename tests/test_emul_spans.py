"""The one planner, block/spans.cuh: every tile once, equal spans, few pieces."""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spans import Rules, SpanProbe


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def probe(request, tmp_path_factory):
    return SpanProbe(tmp_path_factory.mktemp("spans"), request.param)


def check(rules, found):
    """What every kernel relies on."""
    segments = rules.segments()
    ends = list(accumulate(tiles for _, tiles in segments))
    total = ends[-1] if ends else 0
    begins = found.begins.tolist()
    assert begins[0] == 0
    assert begins[-1] == total
    assert begins == sorted(begins)
    assert found.table[len(rules.q_lens)] == total
    assert found.requests.tolist() == [i for i, tiles in segments for _ in range(tiles)]
    for end, (_, tiles) in zip(ends, segments, strict=True):
        inside = [b for b in begins if end - tiles < b < end]
        pieces = len(set(inside)) + 1
        if rules.most_pieces:
            assert pieces <= rules.most_pieces
        if pieces > 1:  # owners are asked of these alone
            owner = [bisect(begins, tile) - 1 for tile in (end - tiles, end - 1)]
            assert set(found.firsts[end - tiles : end]) == {owner[0]}
            assert set(found.counts[end - tiles : end]) == {owner[1] - owner[0] + 1}
    return segments, [b - a for a, b in pairwise(begins)]


LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([15, 16, 17, 255, 256, 257, 1000]))
REQUESTS = st.lists(st.tuples(st.sampled_from([1, 1, 1, 0, 2, 4, 33]), LENGTHS), min_size=1,
                    max_size=140)  # fmt: skip
WINDOWS = st.sampled_from([(-1, -1), (-1, 0), (20, 0), (0, 0), (100, 30)])


@given(
    requests=REQUESTS, window=WINDOWS, group=st.sampled_from([1, 4, 7]), units=st.integers(1, 3),
    spans=st.sampled_from([1, 2, 7, 264]), tile_shift=st.sampled_from([4, 5]),
    fewest_shift=st.sampled_from([0, 2]), align_most=st.sampled_from([0, 1 << 30]),
    most_pieces=st.sampled_from([0, 1, 2, 5]), most_rows=st.sampled_from([1 << 30, 16]),
    segment_tiles=st.sampled_from([0, 3]), with_table=st.booleans(),
)  # fmt: skip
def test_every_tile_is_in_one_span(probe, requests, with_table, **rules):
    q_lens, kv_lens = map(list, zip(*requests, strict=True))
    rules = Rules(q_lens, kv_lens, **rules)
    found = probe.run(rules, with_table)
    segments, spans = check(rules, found)
    alike = len({t for _, t in segments}) <= 1
    if not alike and rules.most_pieces == 0:
        assert max(spans) - min(s for s in spans if s) <= 1  # equal, up to the rounding


@given(requests=REQUESTS, window=WINDOWS, spans=st.sampled_from([3, 132]))
def test_a_table_made_ahead_changes_nothing(probe, requests, **rules):
    q_lens, kv_lens = map(list, zip(*requests, strict=True))
    rules = Rules(q_lens, kv_lens, **rules)
    own, table = probe.run(rules), probe.run(rules, with_table=True)
    assert own.begins.tolist() == table.begins.tolist()
    assert own.firsts.tolist() == table.firsts.tolist()
    assert own.counts.tolist() == table.counts.tolist()
    assert own.table.tolist() == table.table.tolist()


@pytest.mark.parametrize(("batch", "spans"), [(1, 8), (8, 264), (32, 264), (4, 132), (264, 132)])
def test_equal_segments_are_cut_at_their_ends(probe, batch, spans):
    rules = Rules([1] * batch, [4096] * batch, units=8 if batch < 100 else 1, spans=spans)
    segments, lengths = check(rules, probe.run(rules))
    ends = set(accumulate(tiles for _, tiles in segments))
    begins = set(accumulate(lengths))
    assert ends <= begins or begins <= ends


def test_no_split_means_whole_segments(probe):
    rules = Rules([1] * 9, [100, 3000, 0, 17, 16, 2000, 1, 0, 900], most_pieces=1, spans=6)
    segments, _ = check(rules, probe.run(rules))
    assert len(segments) == 7


@pytest.mark.parametrize("batch", [513, 4096, 9000, 65_536])
def test_large_batches(probe, batch):
    rng = np.random.default_rng(batch)
    lengths = rng.integers(0, 60, batch) * (rng.random(batch) < 0.7)
    rules = Rules([1] * batch, lengths.tolist(), spans=264)
    check(rules, probe.run(rules))
    if batch < 9000:
        alike = Rules([1] * batch, [33] * batch, spans=264)
        found = probe.run(alike)
        assert found.table[batch + 2 :].tolist() == [3, 1, 1, 0]
        check(alike, found)


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize(
    ("pair_time", "most"),
    [(0.0, 132), (1e-4, 132), (0.0032, 127), (0.02, 100), (0.2, 32), (1.0, 8), (1e6, 1)],
)
def test_what_another_launch_needs_is_left_to_it(probe, pair_time, most, with_table):
    """24,000 ns of one multiprocessor here, 225 at the rate of the memory."""
    rules = Rules(
        [1] * 30 + [500, 0, 100], [160, 320] * 15 + [1000, 5, 100], window=(-1, 0), spans=132,
        most_rows=16, tile_time=53.5, tile_floor=0.5, pair_time=pair_time,
    )  # fmt: skip
    segments, spans = check(rules, probe.run(rules, with_table))
    tiles, pairs = sum(n for _, n in segments), 500 * (501 + 1000) / 2 + 100 * 101 / 2
    assert tiles == 450
    time = max(0.5 * tiles, (53.5 * tiles + pair_time * pairs) / 132)
    wanted = 132 - pair_time * pairs / time
    assert abs(sum(n > 0 for n in spans) - max(1.0, wanted)) <= 1
    assert abs(sum(n > 0 for n in spans) - most) <= 1


def test_nothing_to_do(probe):
    for lengths in ([0], [0, 0, 0]):
        found = probe.run(Rules([1] * len(lengths), lengths))
        assert not found.begins.any()
