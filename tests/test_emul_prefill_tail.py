"""The 8-bit Hopper prefill with its last tiles cut into pieces, on the emulator."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import emulated
from graphs import capture
from hypothesis import given
from hypothesis import strategies as st
from prefill import check_nan_key
from repeats import bits
from tails import cut_tails, even_cases

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.device import active_device
from cupyflash.runtime.workspace import scratch_of
from cupyflash.testing import Case

E4M3 = {"q_type": "e4m3", "kv_type": "e4m3"}
SEEN = Case(lengths=((200, 500), (200, 30)), num_heads_kv=1, group_size=2, head_dim=128,
            descale=True, **E4M3)  # fmt: skip


def counters():
    with scratch_of(active_device(), None) as scratch:
        return scratch.counters


@given(
    case=even_cases(),
    left=st.integers(1, 9),
    cut=st.integers(2, 5),
    lse=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_case(case, left, cut, lse, seed):
    with emulated("sm_90a", num_sms=3, seed=seed), cut_tails(left, cut):
        case.make().check(flash_attn_varlen_func, return_softmax_lse=lse)
        assert "attention_fwd_sm90_fp8" in active_device().reports[-1].symbol
        assert not counters().any()


@pytest.mark.parametrize("pattern", ["normal", "spiky", "outlier", "opposed", "ascending_v"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (150, 0)},
                                  {"window_size": (20, 30), "sink": True}])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lse", [False, True])
def test_every_mask(lse, head_dim, mask, pattern):
    case = SEEN.replace(head_dim=head_dim, pattern=pattern, **mask)
    with emulated("sm_90a", num_sms=2), cut_tails(3, 3):
        case.make().check(flash_attn_varlen_func, return_softmax_lse=lse)


@pytest.mark.parametrize("cut", [2, 16])
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"alibi": "request"}, {"page_size": 16}])
def test_modified_scores_and_pages(options, cut):
    with emulated("sm_90a", num_sms=2), cut_tails(2, cut):
        SEEN.replace(causal=True, **options).make().check(flash_attn_varlen_func)


@pytest.mark.parametrize("seed", range(6))
def test_pieces_that_run_again_wait_for_no_other(seed):
    """Some of their warps have arrived before, and do not again."""
    case = SEEN.replace(pattern="outlier", softmax_scale=60.0, head_dim=128, causal=True)
    with emulated("sm_90a", num_sms=3, seed=seed), cut_tails(3, 3):
        case.make().check(flash_attn_varlen_func, return_softmax_lse=seed % 2 > 0)
        assert not counters().any()


@pytest.mark.parametrize("cut", [2, 3])
def test_a_nan_key_is_seen_through_every_piece(cut):
    case = Case(
        lengths=((150, 0),), num_heads_kv=1, group_size=1, head_dim=128, causal=True, **E4M3
    )
    with emulated("sm_90a", num_sms=2), cut_tails(2, cut):
        check_nan_key(case.make(), 0x7F)
        assert not counters().any()


def test_the_order_of_blocks_and_warps_changes_no_bit():
    inputs, found = SEEN.replace(causal=True, page_size=16).make(), []
    for seed in range(8):
        with emulated("sm_90a", num_sms=2 + seed % 3, seed=seed), cut_tails(3, 4):
            found += [bits(inputs.call(flash_attn_varlen_func)) for _ in range(2)]
    assert all(each == found[0] for each in found)
    with emulated("sm_90a", num_sms=2), cut_tails(3, 4):
        assert bits(inputs.call(flash_attn_varlen_func, num_splits=1)) != found[0]


def test_a_captured_call_is_replayed():
    inputs, rows = SEEN.make(), sum(SEEN.q_lens)
    with emulated("sm_90a", num_sms=2), cut_tails(3, 3):
        wanted = bits(inputs.call(flash_attn_varlen_func))
        out, lse = (inputs.placed[name].view for name in ("out", "lse"))
        graph = capture(
            SimpleNamespace(name="emulator"),
            lambda: flash_attn_varlen_func(
                **inputs.args, out=out, lse=lse, return_softmax_lse=True
            ),
        )
        for _ in range(3):
            out[:rows], lse[:, :rows] = 0, 0
            graph.replay()
            assert not counters().any()
        kept = np.array(out), np.array(lse)
        again = inputs.call(flash_attn_varlen_func)
        assert bits(again) == wanted
        assert kept[0][:rows].tobytes() == again[0][:rows].tobytes()
        assert kept[1][:, :rows].tobytes() == again[1][:, :rows].tobytes()
