"""Schedules of shared prefixes that are made ahead, on the emulator: how calls take them."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import device_array, emulated
from prefixes import SHARED, cascade, make_shared, schedule_of

from cupyflash import SideStream

ALL, LEVELS = [([0, 1, 2, 3], 64)], [([0, 1, 2, 3], 64), ([0, 2], 128), ([2, 0], 160)]


def test_layers_share_a_schedule_that_was_made_ahead():
    inputs, tree = make_shared(SHARED, LEVELS)
    with emulated("sm_90", num_sms=3) as device:
        schedule = schedule_of(inputs, tree)
        for softcap in (0.0, 0.0, 5.0):
            inputs.args["softcap"], inputs._expected = softcap, None
            cascade(inputs, tree, prefix_scheduler_metadata=schedule)
        names = [r.symbol.split("_sm90")[0] for r in device.reports]
        assert names == ["schedule_shared", *["attention_shared"] * 3]
        again = schedule_of(inputs, tree, out=schedule.buffer)
        assert again.buffer is schedule.buffer


def test_a_schedule_made_on_a_side_stream_is_waited_for_once():
    inputs, tree = make_shared(SHARED, LEVELS)
    with emulated("sm_90", num_sms=3) as device:
        ordered = []
        device.order = lambda first, then: ordered.append((first, then))
        side = SideStream(inputs.args["seqused_k"])
        schedule = schedule_of(inputs, tree, stream=side)
        assert (schedule.side, ordered) == (side, [(0, 1)])
        for _ in range(2):
            cascade(inputs, tree, prefix_scheduler_metadata=schedule)
        assert ordered == [(0, 1), (1, 0)]
        side.join(7)
        assert ordered[2:] == [(1, 7)]


def test_the_cpu_has_no_side_stream():
    side = SideStream(np.zeros(3, np.int32))
    side.join()
    assert side.ptr is None


@pytest.mark.parametrize("alibi", ["", "head"])
def test_a_schedule_for_few_rows(alibi):
    """With ALiBi rows are merged whole, which a schedule is not told."""
    case = SHARED.replace(lengths=((1, 200), (1, 150)), num_heads_kv=1, alibi=alibi)
    inputs, tree = make_shared(case, [([0, 1], 128)])
    with emulated("sm_90", num_sms=8):
        cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))


def test_schedules_for_other_calls_are_refused():
    inputs, tree = make_shared(SHARED, LEVELS)
    other, smaller = make_shared(SHARED.replace(lengths=SHARED.lengths[:3]), [([0, 1], 64)])
    with emulated("sm_90"):
        with pytest.raises(ValueError, match=r"made for other calls.*get_prefix_schedule"):
            cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(other, smaller))
        with pytest.raises(ValueError, match=r"needs [0-9]+"):
            schedule_of(inputs, tree, out=device_array(16, np.uint8))
        assert schedule_of(*make_shared(SHARED.replace(page_size=8), ALL)) is None
    assert schedule_of(inputs, tree) is None  # the CPU needs none
    assert np.isnan(inputs.placed["out"].view.astype(np.float32)).all()
