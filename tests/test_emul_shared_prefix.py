"""The kernels of shared prefixes on the emulator, through the public function."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import given
from hypothesis import strategies as st
from prefixes import SHARED, cascade, make_shared, once, schedule_of, shared_cases, through
from test_cascade import cascade as cascade_of
from test_cascade import check_cascade, empty_output, shared_case

from cupyflash import AttentionBounds, find_prefix_tree, workspace_size
from cupyflash.prefix_tree import PrefixTree, prefix_tree
from cupyflash.runtime.shared_plan import make_shared_plan, shared_plans

KERNEL = "attention_shared"
ALL, LEVELS = [([0, 1, 2, 3], 64)], [([0, 1, 2, 3], 64), ([0, 2], 128), ([2, 0], 160)]


def check(case, groups, device, **more):
    inputs, tree = make_shared(case, groups)
    inputs.check(once(tree, **more))
    assert through(KERNEL, device), [r.symbol for r in device.reports]


@given(
    drawn=shared_cases(), order=st.integers(0, 9), num_sms=st.sampled_from([3, 1, 2, 5]),
    most=st.sampled_from([0, 0, 2, 5]),
)  # fmt: skip
def test_any_tree_is_attention(drawn, order, num_sms, most):
    with emulated("sm_90", num_sms=num_sms, seed=order) as device:
        check(*drawn, device, num_splits=most)


@given(
    drawn=shared_cases(most_requests=6), order=st.integers(0, 9), num_sms=st.sampled_from([24, 61]),
    most=st.sampled_from([0, 0, 2, 5]),
)  # fmt: skip
def test_any_tree_of_few_rows(drawn, order, num_sms, most):
    """Two warps of a CTA make its schedule."""
    case, groups = drawn
    most_tokens = max(q for q, _ in case.lengths)
    rows = len(case.lengths) * most_tokens * case.group_size * case.num_heads_kv
    with emulated("sm_90", num_sms=num_sms, seed=order) as device:
        check(case, groups, device, num_splits=most)
        assert through("_parts", device) == (rows <= 2 * num_sms and not case.alibi)


@pytest.mark.parametrize("count", [31, 32, 33])
def test_as_many_requests_as_a_warp_has_lanes(count):
    case = SHARED.replace(
        lengths=tuple((1, 131 + 3 * i) for i in range(count)), num_heads_kv=1, group_size=1
    )
    groups = [(range(count), 64), (range(0, count, 2), 112), (range(1, count, 2), 128)]
    with emulated("sm_90", num_sms=17, seed=count) as device:
        check(case, groups, device)
        assert through("_parts", device) == (count <= 32)
        inputs, tree = make_shared(case, groups)
        cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))
        assert through("_parts_ahead", device)


@given(drawn=shared_cases(), num_sms=st.sampled_from([3, 1, 5, 16]))
def test_any_tree_with_a_schedule_made_ahead(drawn, num_sms):
    case, groups = drawn
    case = case.replace(causal=True, window_size=(case.window_size[0], 0))
    with emulated("sm_90", num_sms=num_sms, seed=1):
        inputs, tree = make_shared(case, groups)
        cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))


@given(drawn=shared_cases(), num_sms=st.sampled_from([3, 1, 5]), levels=st.integers(1, 3))
def test_any_tree_that_is_found_with_its_schedule(drawn, num_sms, levels):
    case, groups = drawn
    case = case.replace(causal=True, window_size=(case.window_size[0], 0))
    with emulated("sm_90", num_sms=num_sms, seed=3) as device:
        inputs, _ = make_shared(case, groups)
        args, batch = inputs.args, len(case.lengths)
        table, lengths, starts = args["block_table"], args["seqused_k"], args["cu_seqlens_q"]
        tree = PrefixTree(batch, levels, device_array((2 * levels + 1) * batch, np.int32, 99))
        made = schedule_of(inputs, tree, block_table=table, null_block=0)
        assert through("share_prefixes", device)
        cascade(inputs, tree, prefix_scheduler_metadata=made)
        alone = find_prefix_tree(
            table, lengths, case.page_size, starts, levels=levels, null_block=0
        )
        np.testing.assert_array_equal(tree.buffer, alone.buffer)


@pytest.mark.parametrize("groups", [[], ALL, LEVELS, [([1, 3], 80)], [([0], 64), ([1, 2], 16)]])
@pytest.mark.parametrize("num_sms", [1, 2, 16])
def test_groups_levels_and_outsiders(groups, num_sms):
    with emulated("sm_90", num_sms=num_sms, seed=1) as device:
        check(SHARED, groups, device)


@pytest.mark.parametrize("count", [9, 17, 33, 40])
def test_rows_of_more_than_one_block(count):
    """16 requests of 4 heads fill a warpgroup, 32 a block."""
    case = SHARED.replace(lengths=((1, 131),) * count, num_heads_kv=1)
    with emulated("sm_90", num_sms=3, seed=2) as device:
        check(case, [(list(range(count)), 128)], device)


def test_many_partial_results_of_a_row():
    """More than a warp looks ahead for."""
    case = SHARED.replace(lengths=((1, 64 * 80),) * 2, num_heads_kv=1)
    with emulated("sm_90", num_sms=36, seed=3) as device:
        check(case, [([0, 1], 64 * 78)], device)


def test_members_that_do_not_see_all_leave_the_group():
    """Too short, or without queries; their rows of the table may hold anything."""
    case = SHARED.replace(lengths=((0, 0), (2, 62), (1, 62), (1, 200), (1, 100)))
    inputs, tree = make_shared(case, [([0, 1, 2, 3, 4], 64)])
    inputs.args["block_table"][0, :] = 2**31 - 1
    with emulated("sm_90", num_sms=2) as device:
        inputs.check(once(tree))
        assert through(KERNEL, device)


def test_shared_keys_are_read_once():
    """77 of 1101 keys are own; the products with shared ones count too."""
    case = SHARED.replace(lengths=((1, 1100),) * 4)
    with emulated("sm_90", num_sms=2) as device:
        for groups in ([], [([0, 1, 2, 3], 1024)]):
            check(case, groups, device)
        alone, shared = [r.mma_count for r in device.reports if KERNEL in r.symbol]
        assert shared < alone / 4


@pytest.mark.parametrize("window", [700, 300])
def test_what_a_window_sees_of_shared_keys_is_read_once(window):
    """From key 448 on all see 64 x 9 shared keys; with 300 they see too little of them."""
    case = SHARED.replace(
        lengths=((1, 1100), (1, 1090), (2, 1080), (1, 1110)), window_size=(window, 0)
    )
    with emulated("sm_90", num_sms=2) as device:
        for groups in ([], [([0, 1, 2, 3], 1024)]):
            check(case, groups, device)
        alone, shared = [r.mma_count for r in device.reports if KERNEL in r.symbol]
        assert shared < alone / 2 if window == 700 else shared == alone


def test_same_bits_whatever_the_order():
    inputs, tree = make_shared(SHARED, LEVELS)
    found = set()
    for seed in range(6):
        with emulated("sm_90", seed=seed):
            found.add(inputs.call(once(tree))[0].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 8}, {"kv_type": "e4m3", "head_dim": 72}, {"head_dim": 192}, {"layout": "odd"},
        {"lengths": ((17, 200), (1, 150), (1, 170), (1, 90))},
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_served_all_the_same(changes):
    inputs, tree = make_shared(SHARED.replace(**changes), ALL)
    with emulated("sm_90") as device:
        cascade(inputs, tree)
        assert not through(KERNEL, device)


def test_a_tree_that_changes_between_calls_of_one_graph():
    """What is captured are addresses; the tree and the lengths behind them may change."""
    case = SHARED.replace(lengths=((1, 200),) * 4)
    buffer = device_array((2 * 2 + 1) * 4, np.int32)
    with emulated("sm_90", num_sms=2):
        for groups in (ALL, LEVELS[:2], [], [([0, 3], 112), ([1, 2], 48)]):
            inputs, _ = make_shared(case, groups)
            cascade(inputs, prefix_tree(groups, 4, levels=2, out=buffer))


def test_a_nan_query_is_a_nan_row():
    inputs, tree = make_shared(SHARED, ALL)
    with emulated("sm_90"):
        right = inputs.call(once(tree))[0].astype(np.float32)
        inputs.args["q"][2, 1] = np.nan
        found = inputs.call(once(tree))[0].astype(np.float32)
    assert np.isnan(found[2, 1]).all()
    found[2, 1] = right[2, 1]
    assert np.array_equal(found[:4], right[:4])


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"sink": True, "softcap": 5.0}, {"kv_type": "fp16"}, {"window_size": (40, 3)},
        {"alibi": "request"},
    ],
)  # fmt: skip
def test_a_prefix_of_all(changes):
    kind = {"q_type": changes["kv_type"]} if "kv_type" in changes else {}
    args = shared_case(**changes, **kind)
    with emulated("sm_90", num_sms=2, seed=1) as device:
        check_cascade(args)
        assert [r.symbol.split("_sm90")[0] for r in device.reports] == ["attention_shared"]
        check_cascade(args, fa_version=2)
        assert KERNEL not in device.reports[-1].symbol


def test_trees_and_calls_that_do_not_fit_are_refused():
    inputs, tree = make_shared(SHARED, ALL)
    _, smaller = make_shared(SHARED.replace(lengths=SHARED.lengths[:3]), [([0, 1], 64)])
    with emulated("sm_90"), pytest.raises(ValueError, match="prefix_tree is of 3 requests"):
        cascade(inputs, smaller)
    args = shared_case()
    for wrong in ({}, {"common_prefix_len": 0, "prefix_scheduler_metadata": object()}):
        with pytest.raises(ValueError, match="the tree says what is shared; use 0 and None"):
            cascade_of(args, empty_output(args), prefix_tree=tree, **wrong)
    assert np.isnan(inputs.placed["out"].view.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([([0, 1], 16), ([1, 2], 32)], "overlaps another"),
        ([([0, 4], 16)], "requests are 0 to 3"),
        ([(list(range(4 - n)), 16 * (n + 1)) for n in range(4)], "groups of 4 levels"),
    ],
)
def test_groups_that_make_no_tree_are_refused(groups, words):
    with pytest.raises(ValueError, match=words):
        prefix_tree(groups, 4)


@pytest.mark.parametrize("levels", [0, 2])
def test_a_warm_up_prepares_what_a_capture_needs(levels):
    bounds = AttentionBounds(
        batch_size=4, max_seqlen_q=1, max_seqlen_k=201, num_heads_q=8, num_heads_kv=2, headdim=128,
        page_size=16, causal=True, prefix_levels=levels,
    )  # fmt: skip
    with emulated("sm_90", num_sms=2) as device:
        plans = shared_plans(bounds.problem(), device.info, levels)
        assert {plan.variant.source for plan in plans} == (
            {
                "attention_shared_sm90.cu",
                "schedule_shared.cu",
                "find_prefixes.cu",
                "share_prefixes.cu",
            }
            if levels
            else set()
        )
        assert workspace_size(bounds) >= max((p.workspace_bytes for p in plans), default=0)
        needed = make_shared_plan(bounds.problem(), device.info, max(1, levels))
        assert levels == 0 or needed.attend.workspace_bytes <= workspace_size(bounds)
