"""The Hopper prefill kernel on the emulator, through the public function."""

from __future__ import annotations

import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from prefill import TILES, prefill_cases

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.device import active_device
from cupyflash.testing import Case


def runs_prefill():
    return any("attention_fwd_sm90" in report.symbol for report in active_device().reports)


@given(case=prefill_cases(), order=st.integers(0, 9), num_splits=st.sampled_from([0, 0, 1, 3]))
def test_any_case_in_any_order_of_warps(case, order, num_splits):
    with emulated("sm_90a", num_sms=2, seed=order):
        case.make().check(flash_attn_varlen_func, num_splits=num_splits)
        assert runs_prefill()


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_tile(kind, head_dims, name):
    head_dim, head_dim_v = head_dims
    case = TILES[name].replace(head_dim=head_dim, head_dim_v=head_dim_v, q_type=kind, kv_type=kind)
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func)
        assert runs_prefill()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "options", [{"softcap": 50.0}, {"softcap": 0.5}, {"alibi": "request"},
                {"softcap": 5.0, "alibi": "head", "window_size": (90, 20)}]
)  # fmt: skip
def test_modified_scores(head_dim, options):
    case = Case(lengths=((70, 200), (3, 20)), group_size=2, head_dim=head_dim, causal=True,
                q_type="bf16", kv_type="bf16", page_size=16).replace(**options)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func)
        assert runs_prefill()


@pytest.mark.parametrize("num_splits", [2, 3, 8])
@pytest.mark.parametrize("window", [(-1, -1), (200, 0), (300, 40)])
def test_splits_that_some_rows_do_not_reach(num_splits, window):
    case = Case(lengths=((20, 900), (30, 64), (17, -1), (1, 500)), group_size=2, sink=True,
                page_size=16, window_size=window, q_type="bf16", kv_type="bf16")  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func, num_splits=num_splits)
        assert runs_prefill()


def test_more_requests_than_are_sorted():
    """Over 128 requests of different lengths: tiles are found by a search."""
    case = Case(lengths=tuple((1 + 7 * i % 19, i % 40) for i in range(140)), causal=True,
                q_type="fp16", kv_type="fp16", page_size=16)  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func)
        assert runs_prefill()


def test_a_graph_with_bounds_far_above_the_lengths():
    inputs = Case(lengths=((40, 30), (2, 0), (0, 5)), causal=True, q_type="bf16", kv_type="bf16",
                  page_size=16).make()  # fmt: skip
    inputs.args.update(max_seqlen_q=300, max_seqlen_k=9000)
    with emulated("sm_90a", num_sms=3):
        inputs.check(flash_attn_varlen_func)
        assert runs_prefill()


def test_the_counter_of_tiles_is_zero_between_launches():
    case = Case(lengths=((140, 0), (20, 50)), num_heads_kv=2, causal=True, q_type="bf16",
                kv_type="bf16")  # fmt: skip
    with emulated("sm_90a", num_sms=2):
        results = [case.make().call(flash_attn_varlen_func) for _ in range(3)]
    first = [array.tobytes() for array in results[0]]
    assert all([array.tobytes() for array in more] == first for more in results[1:])


def test_what_tma_cannot_read_goes_to_the_portable_kernel():
    """Rows that do not start at multiples of 16 bytes."""
    case = Case(lengths=((40, 3),), q_type="bf16", kv_type="bf16", layout="odd")
    with emulated("sm_90a", num_sms=2):
        case.make().check(flash_attn_varlen_func)
        assert not runs_prefill()


def test_pages_below_16_and_scales_that_are_not_positive_go_there_too():
    plain = Case(lengths=((40, 3),), q_type="bf16", kv_type="bf16")
    for case in (plain.replace(page_size=8), plain.replace(softmax_scale=-0.1)):
        with emulated("sm_90a", num_sms=2):
            case.make().check(flash_attn_varlen_func)
            assert not runs_prefill()
