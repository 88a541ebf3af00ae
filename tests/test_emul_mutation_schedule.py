"""The machine, or a wrong table, gives away every bug planted in the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import EmulatorError, device_array
from spans import Rules, SpanProbe

SEEDS = range(20)
SCHEDULE, SPANS = "schedule.cu", "block/spans.cuh"
BUGS = {
    "nothing": None,
    "one counter is not cleared": (SCHEDULE, "i < d.counters;", "i < d.counters - 1;"),
    "one counter too many": (SCHEDULE, "i < d.counters;", "i <= d.counters;"),
    "requests past the last": (SCHEDULE, "min(p.batch, begin + kStep)", "begin + kStep"),
    "a request left out between steps": (SCHEDULE, "begin += kStep", "begin += kStep + 1"),
    "earlier steps are forgotten": (
        SPANS, "int run = before.tiles + upto - sum;", "int run = upto - sum;",
    ),
    "sums read before they are there": (
        SPANS, "__syncthreads();\n  BatchTotals totals = before;", "BatchTotals totals = before;",
    ),
    "sums of the next step before all have read": (
        SPANS, "totals.alike = __syncthreads_and(alike) &&", "totals.alike = alike &&",
    ),
    "a lane added twice": (SPANS, "if (lane >= step) upto += other;", "upto += other;"),
    "the warp's own sum counts twice": (SPANS, "if (w < warp) run", "if (w <= warp) run"),
    "the table starts with what was there": (
        SPANS, "if (begin == 0 && threadIdx.x == 0) prefix[0] = 0;", "",
    ),
    "too long a share": (SPANS, "last = min(end, mine + each);", "last = mine + each;"),
    "a tile after the last key": (
        SPANS, "((keys.end - 1) >> d.tile_shift)", "(keys.end >> d.tile_shift)",
    ),
}  # fmt: skip


def tiles_before(rules: Rules) -> list[int]:
    """Of each request, and of all."""
    of = np.zeros(len(rules.q_lens), np.int64)
    for request, tiles in rules.segments():
        of[request] += tiles
    return [0, *np.cumsum(of).tolist()]


BATCHES = [
    Rules([1] * 700, [i * 37 % 61 for i in range(700)], spans=5),
    Rules([1] * 8300, [i * 7 % 41 for i in range(8300)], spans=5),  # two steps
]


@pytest.mark.parametrize("bug", BUGS)
def test_emul_catches_what_is_planted_in_the_schedule(bug, tmp_path):
    probe = SpanProbe(tmp_path, "sm_80", BUGS[bug])
    caught = 0
    for seed in SEEDS:
        probe.device.seed = seed
        try:
            arrivals = device_array(5, np.int32)
            probe.clear(arrivals)
            right = not arrivals.any()
            right &= all(probe.table(rules) == tiles_before(rules) for rules in BATCHES)
        except EmulatorError:
            right = False
        caught += not right
    assert caught == (len(SEEDS) if bug != "nothing" else 0)
