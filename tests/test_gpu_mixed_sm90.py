"""Batches of decode steps and prefills on a GPU: two launches that run at the same time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import bits, check_repeats
from test_emul_mixed_sm90 import MIXED

from cupyflash import hopper
from cupyflash.attention import flash_attn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

LARGE = MIXED.replace(
    lengths=(*((1, 37 * i % 3000) for i in range(40)), (300, 1000), (400, 0), (4, 900)),
    num_heads_kv=2, head_dim=128,
)  # fmt: skip


def plans_in_sequence(call, device, limit):
    """The same two launches, one after the other."""
    decode, prefill = PLANS(call, device, limit)
    key = ("in sequence", prefill)
    if prefill is None:
        return decode, prefill
    waits = replace(prefill, attend=replace(prefill.attend, programmatic=False))
    return call.layout.kept.get(key) or call.layout.keep(key, lambda: (decode, waits))


PLANS = hopper._plans


@settings(max_examples=20)
@given(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 1, 1, 2, 4, 5, 17, 130]),
            st.sampled_from([-2, 0, 1, 40, 150, 900]),
        ),
        min_size=2, max_size=12,
    ).map(tuple),
    group=st.sampled_from([1, 3, 4, 8, 16]), head_dim=st.sampled_from([64, 128, 256]),
    page_size=st.sampled_from([16, None, 64]),
    options=st.sampled_from([
        {}, {"window_size": (40, 0)}, {"softcap": 20.0}, {"sink": True}, {"num_splits": 3},
        {"batch_invariant": True},
    ]),
)  # fmt: skip
@pytest.mark.parametrize("share", range(4))
def test_any_mixture(share, lengths, group, page_size, head_dim, options):
    import cupy

    names = ("num_splits", "batch_invariant")
    call = {k: v for k, v in options.items() if k in names} | {"fa_version": 3}
    fields = {k: v for k, v in options.items() if k not in names}
    case = MIXED.replace(
        lengths=lengths, group_size=group, num_heads_kv=2, page_size=page_size, head_dim=head_dim,
        **fields,
    )  # fmt: skip
    check_repeats(case.make(cupy), flash_attn_varlen_func, **call)


def test_side_by_side_has_the_bits_of_one_after_the_other(monkeypatch):
    import cupy

    inputs = LARGE.make(cupy)
    both = check_repeats(inputs, flash_attn_varlen_func, times=100, fa_version=3)
    monkeypatch.setattr(hopper, "_plans", plans_in_sequence)
    assert bits(inputs.call(flash_attn_varlen_func, fa_version=3)) == bits(both)


@pytest.mark.parametrize("workspace", [False, True])
def test_a_graph_follows_lengths(workspace):
    """Captured when every request is short, replayed with all there is to do."""
    import cupy

    inputs = LARGE.make(cupy)
    right = inputs.call(flash_attn_varlen_func, fa_version=3)
    args, (out, lse) = inputs.args, (inputs.placed[name].view for name in ("out", "lse"))
    used, starts = args["seqused_k"].copy(), args["cu_seqlens_q"].copy()
    arguments = {**args, "out": out, "lse": lse, "fa_version": 3}
    if workspace:
        arguments["workspace"] = cupy.full(64 << 20, 0xFF, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        flash_attn_varlen_func(**arguments)
        args["seqused_k"][...] = cupy.minimum(used, 64)
        args["cu_seqlens_q"][...] = cupy.arange(len(starts))
        stream.begin_capture()
        flash_attn_varlen_func(**arguments)
        graph = stream.end_capture()
        graph.launch(stream)
        args["seqused_k"][...] = used
        args["cu_seqlens_q"][...] = starts
        for _ in range(50):
            inputs.placed["out"].buffer.view(cupy.uint8)[...] = 0xFF
            if workspace:
                arguments["workspace"][...] = 0xFF
            graph.launch(stream)
        stream.synchronize()
    rows = sum(LARGE.q_lens)
    if workspace:
        inputs.expected().check(out.get(), lse.get())
    else:
        assert out.get()[:rows].tobytes() == right[0][:rows].tobytes()
        assert np.array_equal(lse.get()[:, :rows], right[1][:, :rows])
