"""The portable attention kernels on the emulator, through the public function."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from repeats import bits

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.attention_plan import make_attention_plans
from cupyflash.runtime.device import DeviceInfo
from cupyflash.testing import Case
from cupyflash.testing.strategies import cases

HEAD_DIMS = st.sampled_from([64, 8, 80, 96, 128, 160, 192, 256])
ANY = cases(head_dim=HEAD_DIMS, head_dim_v=st.sampled_from([None, 64, 128]))
OPTIONS = {"num_splits": st.sampled_from([0, 1, 2, 5]), "batch_invariant": st.booleans()}


attend = partial(flash_attn_varlen_func, fa_version=2)


def on_kernels(case):
    """float32 attention is NumPy's alone."""
    return case.replace(q_type="fp16", kv_type="fp16") if case.q_type == "fp32" else case


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@given(case=ANY, order=st.integers(0, 9), **OPTIONS)
def test_any_case_in_any_order_of_warps(arch, case, order, num_splits, batch_invariant):
    with emulated(arch, seed=order):
        on_kernels(case).make().check(
            attend, num_splits=num_splits, batch_invariant=batch_invariant
        )


SPLIT = cases(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 2, 5, 17]), st.one_of(st.integers(-3, 30), st.integers(64, 300))
        ),
        max_size=2,
    ).map(lambda some: (*some, (17, 110))),
    head_dim=st.sampled_from([64, 128]),
    num_heads_kv=1,
    group_size=st.sampled_from([1, 3]),
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@given(case=SPLIT, order=st.integers(0, 9), num_splits=st.integers(2, 8))
def test_any_splits_in_any_order_of_warps(arch, case, order, num_splits):
    case = on_kernels(case).replace(window_size=(-1, -1))
    with emulated(arch, seed=order) as device:
        case.make().check(attend, num_splits=num_splits)
        assert "attention_combine.cu" in device.sources


TILES = {
    "decode": Case(lengths=((1, 200), (1, 0), (1, 63)), num_heads_kv=2, group_size=4, page_size=16),
    "rows of 64": Case(lengths=((20, 90), (3, 7)), num_heads_kv=1, group_size=2, causal=True),
    "rows of 128": Case(lengths=((150, 10),), num_heads_kv=4, causal=True),
    "mixed": Case(
        lengths=((1, 300), (40, 30), (1, -1), (3, 200), (70, 0)), num_heads_kv=2, group_size=4,
        page_size=16, causal=True, sink=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("types", [("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "e4m3")])
@pytest.mark.parametrize("name", TILES)
def test_every_tile(name, types, head_dim):
    case = TILES[name].replace(head_dim=head_dim, q_type=types[0], kv_type=types[1])
    with emulated("sm_80", num_sms=2):
        case.make().check(attend)


@pytest.mark.parametrize("softcap", [1e-4, 0.5, 4.0, 50.0, 1e6])
@pytest.mark.parametrize("types", [("bf16", "bf16"), ("bf16", "e4m3")])
def test_scores_below_above_and_far_from_the_cap(types, softcap):
    """Its polynomial, its exponential, and scales whose powers are no normal numbers."""
    case = Case(lengths=((40, 30), (1, 90)), num_heads_kv=1, group_size=2, head_dim=128,
                softcap=softcap, q_type=types[0], kv_type=types[1])  # fmt: skip
    with emulated("sm_90"):
        case.make().check(attend)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_sink_is_rounded_once(arch):
    case = Case(lengths=((1, 2),), alibi="head", sink=True, pattern="one_hot", seed=44766,
                q_type="fp16", kv_type="fp16")  # fmt: skip
    with emulated(arch):
        case.make().check(attend)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_key_with_all_the_weight_after_the_first_ones(arch):
    """Its weight, over their largest score, is 2^51.3: rounded, as all weights are."""
    case = Case(lengths=((1, 117), (1, 64), (17, 110)), head_dim=128, page_size=64, softcap=30.0,
                softmax_scale=1.0, alibi="head", q_type="bf16", kv_type="bf16", pattern="one_hot",
                seed=333)  # fmt: skip
    with emulated(arch, seed=5):
        case.make().check(attend, num_splits=5)


@pytest.mark.parametrize("num_splits", [2, 3, 8])
@pytest.mark.parametrize("window", [(-1, -1), (40, 0), (100, 30)])
def test_splits_that_some_rows_do_not_reach(num_splits, window):
    case = Case(
        lengths=((3, 500), (1, 64), (2, -1), (1, 127)), num_heads_kv=2, group_size=2, sink=True,
        page_size=16, window_size=window, q_type="bf16", kv_type="bf16",
    )  # fmt: skip
    with emulated("sm_80"):
        case.make().check(attend, num_splits=num_splits)


def test_bounds_that_are_too_large_change_nothing_but_the_split():
    """As in a captured graph: lengths far below the bounds."""
    case = Case(lengths=((1, 70), (1, 5)), page_size=16, q_type="fp16", kv_type="fp16")
    inputs = case.make()
    inputs.args.update(max_seqlen_q=64, max_seqlen_k=100_000)
    with emulated("sm_80"):
        inputs.check(attend)


def test_batch_invariant_bits_do_not_depend_on_bounds_or_splits():
    case = Case(lengths=((5, 300), (1, 90)), group_size=4, page_size=16, q_type="bf16",
                kv_type="bf16", causal=True)  # fmt: skip
    with emulated("sm_80"):
        right = case.make().call(attend, batch_invariant=True)
        for bound, splits in ((305, 8), (4096, 0), (4096, 1)):
            inputs = case.make()
            inputs.args.update(max_seqlen_k=bound, max_seqlen_q=bound)
            found = inputs.call(attend, batch_invariant=True, num_splits=splits)
            assert bits(found) == bits(right)


_CAPPED = Case(lengths=((119, 58), (92, 40)), num_heads_kv=2, head_dim=128, page_size=16,
               causal=True, window_size=(40, -1), softcap=8.0, alibi="head", seed=21)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        _CAPPED.replace(q_type="fp16", kv_type="fp16"),
        _CAPPED.replace(q_type="bf16", kv_type="bf16", head_dim=64, alibi="", seed=109,
                        lengths=((95, 28), (94, 35))),
    ],
    ids=["128", "64"],
)  # fmt: skip
def test_narrow_and_wide_tiles_give_a_row_the_same_bits(case):
    """Keys that a row does not see, and the wide tile alone loads, once chose the cap's formula."""
    found, used = [], []
    for num_sms in (4, 64):
        with emulated("sm_80", num_sms=num_sms) as device:
            found.append(bits(case.make().call(attend, batch_invariant=True)))
            used += [report.symbol for report in device.reports]
    assert [name.split("_")[-2] for name in used] == ["m128", "m64"]
    assert found[0] == found[1]


def test_large_queries_over_an_8_bit_cache():
    """bf16 queries past the range of fp16, in which the products are computed."""
    inputs = Case(lengths=((3, 20),), q_type="bf16", kv_type="e4m3", softmax_scale=1e-6).make()
    inputs.args["q"][...] = (inputs.args["q"].astype(np.float32) * 1e5).astype(
        inputs.args["q"].dtype
    )
    with emulated("sm_80"):
        inputs.check(attend)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_scale_of_any_sign(scale, softcap):
    case = Case(lengths=((4, 90),), q_type="fp16", kv_type="fp16", softmax_scale=scale,
                softcap=softcap, causal=True)  # fmt: skip
    with emulated("sm_80"):
        case.make().check(attend)


H200 = DeviceInfo("H200", 0, (9, 0), 132, 227 << 10)


def plan_of(**changes):
    from cupyflash.bounds import AttentionBounds

    given = {"batch_size": 1, "max_seqlen_q": 1, "max_seqlen_k": 8192, "num_heads_q": 32,
             "num_heads_kv": 8, "headdim": 128, "page_size": 16}  # fmt: skip
    limit, info = changes.pop("limit", 1 << 28), changes.pop("info", H200)
    return make_attention_plans(AttentionBounds(**{**given, **changes}).problem(), info, limit)[-1]


def test_a_small_batch_is_split_and_a_large_one_is_not():
    few = {"max_seqlen_q": 100, "num_heads_q": 8}
    assert plan_of(**few).splits > 2
    assert plan_of(**few, batch_size=1024).splits == 1
    assert plan_of(num_splits=1, **few).splits == plan_of(batch_invariant=True).splits == 1
    assert plan_of(num_splits=3, **few).splits == 3
    assert plan_of(max_seqlen_k=32, **few).splits == 1


def test_splits_fit_the_workspace_that_is_given():
    for limit in (0, 20_000, 1 << 20, 10 << 20):
        plan = plan_of(limit=limit, max_seqlen_q=100, num_heads_q=8)
        assert plan.forward.workspace_bytes <= limit
        assert plan.splits * plan.chunk >= 8192


def test_spans_fill_the_device_and_fit_the_workspace_that_is_given():
    whole = plan_of()
    assert whole.forward.grid == (264, 1, 1)
    assert plan_of(num_splits=1).forward.workspace_bytes == 0
    assert plan_of(batch_size=600, num_splits=1).forward.workspace_bytes == (600 + 6) * 4 + 8
    for limit in (0, 20_000, 500_000, whole.forward.workspace_bytes - 1):
        plan = plan_of(limit=limit)
        assert plan.forward.workspace_bytes <= limit
        assert plan.memory.rows or plan.forward.grid == whole.forward.grid


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
def test_shared_memory_fits_the_smallest_device(capability):
    info = DeviceInfo("small", 0, capability, 80, 99 << 10)
    for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        for tokens in (1, 8, 4096):
            plan = plan_of(headdim=head_dim, headdim_v=head_dim_v, max_seqlen_q=tokens, info=info)
            assert plan.forward.smem_bytes <= info.smem_optin - 256


@pytest.mark.parametrize("types", [("fp16", "fp16"), ("bf16", "e4m3")])
def test_warps_without_keys_do_not_outweigh_one_with_low_scores(types):
    """Decoding one key whose score is far below 0: three of the four warps have none."""
    case = Case(lengths=((1, 0),), head_dim=32, q_type=types[0], kv_type=types[1])
    inputs = case.make()
    inputs.args["q"][...] = np.full(inputs.args["q"].shape, -60, inputs.args["q"].dtype)
    inputs.args["k"][...] = np.full(1, 60, np.float32).astype(inputs.args["k"].dtype)
    with emulated("sm_80"):
        inputs.check(attend)
