"""The Hopper kernel of multi-head latent attention on the emulator, through the public function."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from latent import hopper_latent
from test_emul_mla import H200, OPTIONS, bounds_of
from test_mla import CASE

from cupyflash import support
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.kernel_source import kernel_root
from cupyflash.runtime.latent_plan import latent_refusal, make_latent_plan
from cupyflash.runtime.mla_plan import mla_plans
from cupyflash.testing.strategies import cases
from cupyflash.warmup import workspace_size

ANY_HEADS = cases(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 4, 0, 9]),
            st.one_of(st.integers(-5, 20), st.sampled_from([63, 64, 127, 190, 255, 400])),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    q_v=True,
    num_heads_kv=st.sampled_from([1, 1, 1, 2]),
    group_size=st.sampled_from([64, 33, 128, 70, 16, 3]),
    head_dim=st.sampled_from([64, 64, 8]),
    head_dim_v=st.sampled_from([512, 512, 256, 72]),
    page_size=st.sampled_from([64, 16, 8, 32, 128, 96, None]),
    softcap=0.0,
    alibi="",
    q_type="bf16",
    kv_type="bf16",
)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@given(
    case=ANY_HEADS,
    order=st.integers(0, 9),
    num_sms=st.sampled_from([1, 2, 5, 40]),
    **OPTIONS,
)
def test_any_case_in_any_order_of_warps(case, kind, order, num_sms, num_splits, batch_invariant):
    case = case.replace(q_type=kind, kv_type=kind)
    with emulated("sm_90", seed=order, num_sms=num_sms), hopper_latent():
        case.make().check(
            flash_attn_varlen_func, num_splits=num_splits, batch_invariant=batch_invariant
        )


HOPPER = {
    "64 heads": ({"group_size": 64}, "mla_decode_sm90_bf16_m64"),
    "tokens side by side": ({"group_size": 16, "lengths": ((4, 30),)}, "mla_decode_sm90_bf16_m64"),
    "few heads": ({"group_size": 2}, "mla_decode_sm90_bf16_m64"),
    "fp16": ({"q_type": "fp16", "kv_type": "fp16"}, "mla_decode_sm90_fp16_m64"),
    "packed": ({"page_size": None}, "mla_decode_sm90_bf16_m64"),
    "pages of 4": ({"page_size": 4}, "mla_decode_sm80_bf16_m16"),
    "odd rows": ({"layout": "odd"}, "mla_decode_sm80_bf16_m16"),
    "soft cap": ({"softcap": 3.0}, "mla_decode_sm80_bf16_m16"),
    "ALiBi": ({"alibi": "head"}, "mla_decode_sm80_bf16_m16"),
}


@pytest.mark.parametrize("name", HOPPER)
def test_which_kernel_runs(name):
    changes, symbol = HOPPER[name]
    inputs = CASE.replace(**{"lengths": ((1, 130), (1, 5)), **changes}).make()
    with emulated("sm_90") as device, hopper_latent():
        inputs.check(flash_attn_varlen_func, num_splits=1)
        assert device.reports[-1].symbol == symbol
        inputs.check(flash_attn_varlen_func, num_splits=1, fa_version=2)
        assert "sm80" in device.reports[-1].symbol


def test_version_3_is_chosen_by_itself_once_its_row_is_built():
    (row,) = [row for row in support.SUPPORT if (row.version, row.latent) == (3, True)]
    inputs = CASE.replace(group_size=64).make()
    with emulated("sm_90") as device:
        inputs.check(flash_attn_varlen_func)
        assert ("sm90" in device.reports[-1].symbol) == row.built


@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 192, 193, 400])
@pytest.mark.parametrize("order", range(2))
def test_tiles_around_the_ring(tokens, order):
    """Fewer tiles than stages, as many, and more, in several orders of warps."""
    case = CASE.replace(lengths=((1, tokens - 1),), group_size=64, page_size=64)
    with emulated("sm_90", seed=order), hopper_latent():
        case.make().check(flash_attn_varlen_func, num_splits=1)


@pytest.mark.parametrize(("num_sms", "order"), [(4, 0), (8, 1), (20, 2), (40, 3)])
def test_pieces_of_one_request(num_sms, order):
    """Two, some, and so many that each of the last to arrive merges some of the rows."""
    case = CASE.replace(lengths=((1, 2559),), group_size=70, page_size=64, sink=True)
    with emulated("sm_90", seed=order, num_sms=num_sms) as device, hopper_latent():
        case.make().check(flash_attn_varlen_func)
        assert len(device.reports) == 1


@pytest.mark.parametrize(("heads", "num_sms"), [(5, 8), (5, 20), (70, 40)])
def test_who_arrives_last_does_not_show(heads, num_sms):
    """Parts are merged by a block that has more to do, or by one that has not: the same bits."""
    case = CASE.replace(lengths=((1, 700), (2, 1500), (1, 300)), group_size=heads, page_size=64)
    inputs, found = case.make(), set()
    for order in range(8):
        with emulated("sm_90", seed=order, num_sms=num_sms), hopper_latent():
            out, lse = inputs.call(flash_attn_varlen_func)
        found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("num_sms", [3, 7, 16])
def test_spans_end_inside_of_requests(num_sms):
    lengths = ((1, 700), (2, 61), (1, 0), (4, 300), (0, 5), (1, -1), (3, -3), (1, 127))
    case = CASE.replace(lengths=lengths, group_size=48, page_size=32)
    with emulated("sm_90", num_sms=num_sms), hopper_latent():
        case.make().check(flash_attn_varlen_func)


@pytest.mark.parametrize("window", [(40, 0), (70, 0), (0, 0), (100, 30)])
def test_row_blocks_that_do_not_see_all_of_their_span(window):
    case = CASE.replace(
        lengths=((40, 300), (9, 120)), group_size=16, causal=False, window_size=window, page_size=64
    )
    with emulated("sm_90", num_sms=6), hopper_latent():
        case.make().check(flash_attn_varlen_func)


def test_a_query_of_nan_is_a_row_of_nan():
    inputs = CASE.replace(lengths=((2, 200), (1, 3))).make()
    inputs.args["q_v"][1, 3] = np.nan
    with emulated("sm_90"), hopper_latent():
        out, lse = inputs.call(flash_attn_varlen_func)
    assert np.isnan(out[1, 3].astype(np.float32)).all()
    assert np.isnan(lse[3, 1])
    out[1, 3], lse[3, 1] = 0, 0
    assert not np.isnan(out[:3].astype(np.float32)).any()
    assert not np.isnan(lse[:, :3]).any()


@pytest.mark.parametrize("rising", [False, True])
def test_scores_that_outgrow_the_shift(rising):
    """Weights may grow to 2^8 before sums are rescaled; the last keys outweigh all or none."""
    inputs = CASE.replace(lengths=((1, 500),), page_size=64, softmax_scale=1.0).make()
    q = inputs.args["q"]
    q[...] = 0
    q[..., 0] = 1
    inputs.args["q_v"][...] = 0
    cache = inputs.placed["kv"].view
    steps = np.linspace(0, 60, 512).reshape(-1, 64)
    order = inputs.args["block_table"][0, :8]
    cache[order, :, 0, 512] = (steps if rising else steps[::-1, ::-1]).astype(cache.dtype)
    with emulated("sm_90"), hopper_latent():
        out, lse = inputs.call(flash_attn_varlen_func)
    inputs.expected().check(out, lse)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
def test_scale_of_any_sign(scale):
    with emulated("sm_90"), hopper_latent():
        CASE.replace(softmax_scale=scale).make().check(flash_attn_varlen_func)


def test_bits_of_a_request_that_is_not_split():
    """They do not depend on the other requests of a batch_invariant call."""
    both = CASE.replace(lengths=((1, 300), (1, 150)), group_size=64, page_size=64).make()
    with emulated("sm_90", num_sms=9), hopper_latent():
        out, _ = both.call(flash_attn_varlen_func, batch_invariant=True)
        args = dict(both.args, cu_seqlens_q=both.args["cu_seqlens_q"][:2])
        args["seqused_k"], args["block_table"] = args["seqused_k"][:1], args["block_table"][:1]
        for name in ("q", "q_v"):
            args[name] = args[name][:1]
        alone = flash_attn_varlen_func(**args, num_splits=1)
    assert alone[:1].tobytes() == out[:1].tobytes()


def test_splits_of_a_given_workspace():
    inputs = CASE.replace(lengths=((1, 900), (2, 300)), page_size=64).make()
    with emulated("sm_90", num_sms=6) as device, hopper_latent():
        room = np.full(workspace_size(bounds_of(max_seqlen_q=3, batch_size=2)), 255, np.uint8)
        inputs.check(flash_attn_varlen_func, workspace=room)
        first, second = device.reports
        assert (first.symbol, second.symbol) == ("schedule", "mla_decode_sm90_bf16_m64")
        inputs.check(flash_attn_varlen_func, workspace=room[:64])
        assert len(device.reports) == 3


def test_bounds_that_are_too_large_change_nothing():
    """As in a captured graph: lengths far below the bounds."""
    inputs = CASE.make()
    inputs.args.update(max_seqlen_q=64, max_seqlen_k=100_000)
    with emulated("sm_90"), hopper_latent():
        inputs.check(flash_attn_varlen_func)


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_workspace_is_enough_for_any_call_within_the_bounds(heads, tokens):
    bounds = {"num_heads_q": heads, "batch_size": 40, "max_seqlen_q": tokens}
    largest = bounds_of(**bounds)
    with emulated("sm_90", num_sms=132), hopper_latent():
        room = workspace_size(largest)
    for batch in (1, 3, 17, 40):
        for keys in (64, 1000, 8192):
            for queries in (1, tokens):
                changes = {"batch_size": batch, "max_seqlen_k": keys, "max_seqlen_q": queries}
                problem = bounds_of(**{**bounds, **changes}).problem()
                plan = make_latent_plan(problem, H200)
                assert plan.memory.rows
                assert plan.attend.workspace_bytes <= room
    variants = {plan.variant for plan in mla_plans(largest.problem(), H200, hopper=True)}
    assert make_latent_plan(largest.problem(), H200).attend.variant in variants


def test_what_it_refuses():
    assert not latent_refusal(bounds_of().problem(), H200)
    assert "pages of 4" in latent_refusal(bounds_of(page_size=4).problem(), H200)
    assert "soft cap" in latent_refusal(bounds_of(softcap=1.0).problem(), H200)
    assert "requests" in latent_refusal(bounds_of(batch_size=40_000).problem(), H200)
    many = bounds_of(batch_size=30_000, max_seqlen_k=1 << 23)
    assert "key tiles" in latent_refusal(many.problem(), H200)


def test_warpgroups_share_the_registers_that_a_launch_has():
    """`setmaxnreg` waits for ever for registers beyond those; an emulator has no such limit."""
    text = kernel_root().joinpath("mla_decode_sm90.cu").read_text()
    (threads,) = map(int, re.findall(r"kThreads = (\d+);", text))
    (taken,) = map(int, re.findall(r"take_registers<(\d+)>", text))
    (given,) = map(int, re.findall(r"give_registers<(\d+)>", text))
    assert threads == 384
    assert taken + 2 * given <= 3 * (65536 // threads // 8 * 8)
