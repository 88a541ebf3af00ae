"""Batches of decode steps and prefills on the emulated Hopper kernels: two launches, one result."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import hopper
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.attention_plan import ATTENTION_PARAMS
from cupyflash.runtime.compile import kernel_source
from cupyflash.runtime.decode_tile import DECODE_PARAMS
from cupyflash.runtime.device import active_device
from cupyflash.runtime.prefill_plan import PREFILL_PARAMS
from cupyflash.testing import Case

MIXED = Case(
    lengths=((1, 300), (40, 70), (1, -1), (3, 17), (0, 0), (4, 200), (5, 100), (2, -3), (130, 0)),
    num_heads_kv=2, group_size=4, head_dim=64, q_type="bf16", kv_type="bf16", page_size=16,
    causal=True,
)  # fmt: skip


def kernels():
    return [r.symbol.split("_sm90")[0] for r in active_device().reports]


def test_each_launch_takes_its_requests():
    with emulated("sm_90", num_sms=4):
        MIXED.make().check(flash_attn_varlen_func, fa_version=3)
        assert [k for k in kernels() if k != "attention_combine"] == [
            "attention_decode",
            "attention_fwd",
        ]


class Recorded:
    """The launches of a call, which can be queued again in any order."""

    def __init__(self, device, inputs, **options):
        self.launches, launch = [], device.launch
        device.launch = lambda *args: (self.launches.append(args), launch(*args))
        try:
            self.first = inputs.call(flash_attn_varlen_func, fa_version=3, **options)
        finally:
            device.launch = launch
        self.replay = lambda order: [launch(*self.launches[i]) for i in order]

    def sources(self):
        return [plan.variant.source.split(".")[0] for _, plan, _, _ in self.launches]


def memory_of(launches):
    """What the decode and the prefill launch have of the workspace, as (begin, end)."""
    (_, decode, args, _), (_, prefill, more, _) = launches[:2]
    own, shared = DECODE_PARAMS.unpack(args.values[1]), PREFILL_PARAMS.unpack(more.values[1])
    partial = ATTENTION_PARAMS.unpack(more.values[0])["partial_out"]
    rows = 2 * own["spans"] * own["row_block"]
    first = own["partial_out"], own["partial_state"] + 8 * rows
    assert prefill.workspace_bytes == decode.workspace_bytes
    return first, (partial or shared["links"], shared["links"] + 4 * shared["items"])


@pytest.mark.parametrize("num_splits", [0, 3])
def test_the_launches_run_side_by_side(num_splits):
    """Neither needs the other's results or memory."""
    with emulated("sm_90", num_sms=4) as device:
        inputs = MIXED.make()
        run = Recorded(device, inputs, num_splits=num_splits)
        assert run.sources()[:2] == ["attention_decode_sm90", "attention_fwd_sm90"]
        assert all(plan.programmatic for _, plan, _, _ in run.launches[:2])
        (begin, end), (other_begin, other_end) = memory_of(run.launches)
        assert begin < end <= other_begin < other_end
        out, lse = (inputs.placed[name].view for name in ("out", "lse"))
        used = sum(MIXED.q_lens)
        kept = out[:used].tobytes(), lse[:, :used].tobytes()
        out.view(np.uint8)[...] = 0xFF
        run.replay([1, 0, *range(2, len(run.launches))])
        assert (out[:used].tobytes(), lse[:, :used].tobytes()) == kept


def test_prefill_is_over_after_decode_is():
    """Later launches wait for the prefill alone; the warp that claims tiles waits last."""
    with emulated("sm_90", num_sms=4) as device:
        run = Recorded(device, MIXED.make())
        text, _ = kernel_source(run.launches[1][1].variant)
        ends = text.split("loader.run_tiles();")
        assert len(ends) == 2
        assert ends[1].split(";")[0].split()[-1] == "wait_for_earlier_launches()"


def test_the_prefill_part_has_the_bits_of_a_prefill_alone(monkeypatch):
    starts = np.cumsum([0, *MIXED.q_lens])
    options = {"fa_version": 3, "num_splits": 1}
    with emulated("sm_90", num_sms=4):
        both, _ = MIXED.make().call(flash_attn_varlen_func, **options)
    monkeypatch.setattr(hopper, "_short_requests", lambda *_: None)
    with emulated("sm_90", num_sms=5):  # another device: nothing planned is found again
        alone, _ = MIXED.make().call(flash_attn_varlen_func, **options)
        assert "attention_decode" not in kernels()
    for i, (q_len, _) in enumerate(MIXED.lengths):
        if q_len > 4:
            rows = slice(starts[i], starts[i + 1])
            assert both[rows].tobytes() == alone[rows].tobytes()


def test_a_batch_of_equal_prefills_is_one_launch():
    with emulated("sm_90", num_sms=4):
        case = MIXED.replace(lengths=((40, 70), (40, 0)))
        case.make().check(flash_attn_varlen_func, fa_version=3)
        assert "attention_decode" not in kernels()


@given(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 1, 2, 4, 5, 17, 33]), st.sampled_from([-2, 0, 1, 40, 150])
        ),
        min_size=2, max_size=6,
    ).map(tuple),
    group=st.sampled_from([1, 3, 4, 8, 16]),
    page_size=st.sampled_from([16, None, 64]),
    options=st.sampled_from([
        {}, {"window_size": (40, 0)}, {"softcap": 20.0}, {"sink": True}, {"num_splits": 3},
        {"batch_invariant": True},
    ]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_mixture(lengths, group, page_size, options, seed):
    names = ("num_splits", "batch_invariant")
    call = {k: v for k, v in options.items() if k in names}
    fields = {k: v for k, v in options.items() if k not in names}
    case = MIXED.replace(
        lengths=lengths, group_size=group, num_heads_kv=1, page_size=page_size, **fields
    )
    with emulated("sm_90", num_sms=6, seed=seed):
        case.make().check(flash_attn_varlen_func, fa_version=3, **call)
