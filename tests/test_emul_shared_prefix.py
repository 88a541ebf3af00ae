"""The kernels of shared prefixes on the emulator, through the public function."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import SHARED, cascade, make_shared, once, shared_cases, through

KERNEL = "attention_shared"
ALL, LEVELS = [([0, 1, 2, 3], 64)], [([0, 1, 2, 3], 64), ([0, 2], 128), ([2, 0], 160)]


def check(case, groups, device, **more):
    inputs, tree = make_shared(case, groups)
    inputs.check(once(tree, **more))
    assert through(KERNEL, device), [r.symbol for r in device.reports]


@settings(max_examples=200)
@given(
    drawn=shared_cases(), order=st.integers(0, 9), num_sms=st.sampled_from([3, 1, 2, 5]),
    most=st.sampled_from([0, 0, 2, 5]),
)  # fmt: skip
def test_any_tree_is_attention(drawn, order, num_sms, most):
    with emulated("sm_90", num_sms=num_sms, seed=order) as device:
        check(*drawn, device, num_splits=most)


@pytest.mark.parametrize("groups", [[], ALL, LEVELS, [([1, 3], 80)], [([0], 64), ([1, 2], 16)]])
@pytest.mark.parametrize("num_sms", [1, 2, 8, 40])
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
        {"page_size": 8}, {"kv_type": "e4m3"}, {"alibi": "head"}, {"head_dim": 192},
        {"window_size": (40, 0)}, {"lengths": ((9, 200), (1, 150), (1, 170), (1, 90))},
        {"layout": "odd"},
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_served_all_the_same(changes):
    inputs, tree = make_shared(SHARED.replace(**changes), ALL)
    with emulated("sm_90") as device:
        cascade(inputs, tree)
        assert not through(KERNEL, device)


def test_a_tree_that_changes_between_calls_of_one_graph():
    """What is captured are addresses; the tree and the lengths behind them may change."""
    from cupyflash.prefix_tree import prefix_tree

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
