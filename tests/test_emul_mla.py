"""The kernels of multi-head latent attention on the emulator, through the public function."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from test_mla import CASE, LATENT

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.bounds import AttentionBounds
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.mla_plan import make_mla_plan, mla_plans
from cupyflash.warmup import workspace_size

OPTIONS = {"num_splits": st.sampled_from([0, 1, 2, 5]), "batch_invariant": st.booleans()}
H200 = DeviceInfo("H200", 0, (9, 0), 132, 227 << 10)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@given(
    case=LATENT,
    kind=st.sampled_from(["bf16", "fp16"]),
    eight_bit=st.booleans(),
    order=st.integers(0, 9),
    **OPTIONS,
)
def test_any_case_in_any_order_of_warps(
    arch, case, kind, eight_bit, order, num_splits, batch_invariant
):
    case = case.replace(q_type=kind, kv_type="e4m3" if eight_bit else kind, descale=eight_bit)
    with emulated(arch, seed=order):
        case.make().check(
            flash_attn_varlen_func,
            fa_version=2,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
        )


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("heads", [1, 16, 17, 128])
def test_a_cache_row_is_read_once_a_row_block(heads, kind):
    """16 or 32 rows share a row of the cache, and nothing else of the cache is read."""
    case = CASE.replace(lengths=((1, 127), (1, 64)), group_size=heads, kv_type=kind)
    inputs = case.make()
    with emulated("sm_80") as device:
        inputs.check(flash_attn_varlen_func, num_splits=1)
        assert ("e4m3" in device.reports[-1].symbol) == (kind == "e4m3")
    rows = 16 if heads <= 16 else 32
    cache = inputs.placed["kv"].view
    keys = sum(case.kv_lens) * cache.shape[-1] * cache.itemsize
    read = sum(device.reports[-1].bytes_read)
    blocks = -(-heads // rows)
    assert keys * blocks <= read < keys * blocks * 1.25 + heads * 2 * 1200


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_scale_of_any_sign(scale, softcap):
    case = CASE.replace(softmax_scale=scale, softcap=softcap)
    with emulated("sm_80"):
        case.make().check(flash_attn_varlen_func)


def test_a_query_of_nan_is_a_row_of_nan():
    inputs = CASE.replace(lengths=((2, 40), (1, 3))).make()
    inputs.args["q_v"][1, 3] = np.nan
    with emulated("sm_80"):
        out, lse = inputs.call(flash_attn_varlen_func)
    assert np.isnan(out[1, 3].astype(np.float32)).all()
    assert np.isnan(lse[3, 1])
    out[1, 3], lse[3, 1] = 0, 0
    assert not np.isnan(out[:3].astype(np.float32)).any()
    assert not np.isnan(lse[:, :3]).any()


def test_splits_of_a_given_workspace():
    inputs = CASE.replace(lengths=((1, 900), (2, 300))).make()
    room = np.zeros(2 * 513 * 4 * inputs.args["q"].shape[0] * 16, np.uint8)
    with emulated("sm_80") as device:
        inputs.check(flash_attn_varlen_func, workspace=room, num_splits=8)
        assert len(device.reports) == 2
        inputs.check(flash_attn_varlen_func, workspace=room[:64], num_splits=8)
        assert len(device.reports) == 3


def test_bounds_that_are_too_large_change_nothing_but_the_split():
    """As in a captured graph: lengths far below the bounds."""
    inputs = CASE.make()
    inputs.args.update(max_seqlen_q=64, max_seqlen_k=100_000)
    with emulated("sm_80"):
        inputs.check(flash_attn_varlen_func)


def bounds_of(**changes):
    given = {"batch_size": 1, "max_seqlen_q": 1, "max_seqlen_k": 8192, "num_heads_q": 16,
             "num_heads_kv": 1, "headdim": 64, "headdim_v": 512, "page_size": 64,
             "q_v": True}  # fmt: skip
    return AttentionBounds(**{**given, **changes})


def test_a_small_batch_is_split_and_a_large_one_is_not():
    def splits(**changes):
        return make_mla_plan(bounds_of(**changes).problem(), H200).splits

    assert splits() > 16
    assert splits(batch_size=128) == 1
    assert splits(num_splits=1) == splits(batch_invariant=True) == 1
    assert splits(num_splits=3) == 3
    assert splits(max_seqlen_k=100) == 1


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_workspace_is_enough_for_any_call_within_the_bounds(heads, tokens):
    bounds = {"num_heads_q": heads, "batch_size": 40, "max_seqlen_q": tokens}
    largest = bounds_of(**bounds)
    with emulated("sm_90", num_sms=132):
        room = workspace_size(largest)
    for batch in (1, 3, 17, 40):
        for keys in (64, 1000, 8192):
            call = bounds_of(**{**bounds, "batch_size": batch, "max_seqlen_k": keys}).problem()
            plan = make_mla_plan(call, H200)
            assert plan.forward.workspace_bytes <= room
            assert plan.splits * plan.tiling.chunk >= keys
    variants = {plan.variant for plan in mla_plans(largest.problem(), H200)}
    assert make_mla_plan(bounds_of(num_heads_q=heads).problem(), H200).forward.variant in variants


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_shared_memory_fits_the_device(capability):
    room = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10
    info = DeviceInfo("some", 0, capability, 80, room)
    for heads in (16, 128):
        problem = bounds_of(num_heads_q=heads).problem()
        assert make_mla_plan(problem, info).forward.smem_bytes <= room - 256
