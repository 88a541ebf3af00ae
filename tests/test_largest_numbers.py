"""The largest and smallest numbers that a call may state."""

from __future__ import annotations

import numpy as np
import pytest
from test_problem import paged, problem_of

from cupyflash.attention import describe_call, flash_attn_varlen_func
from cupyflash.bounds import AttentionBounds
from cupyflash.testing import Case

MOST = 1 << 30
CASES = {
    "decode": Case(lengths=((1, 700), (3, 17)), page_size=16, q_type="fp16", kv_type="fp16"),
    "packed": Case(lengths=((70, 30), (1, 5)), q_type="fp16", kv_type="fp16"),
}


@pytest.mark.parametrize("window", [(-1, -1), (MOST - 1, MOST - 1), (MOST // 4, MOST // 3)])
@pytest.mark.parametrize("name", CASES)
def test_bounds_of_a_thousand_million_tokens(path, name, window):
    inputs = CASES[name].make(path.xp)
    inputs.args.update(max_seqlen_q=MOST, max_seqlen_k=MOST, window_size=window)
    inputs.check(flash_attn_varlen_func)


@pytest.mark.parametrize("num_splits", [1 << 31, 1 << 40])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_splits(path, name, num_splits):
    inputs = CASES[name].make(path.xp)
    inputs.check(flash_attn_varlen_func, num_splits=num_splits)


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1e4, 1e30])
@pytest.mark.parametrize("name", CASES)
def test_soft_caps_from_one_end_to_the_other(path, name, softcap):
    CASES[name].replace(softcap=softcap).make(path.xp).check(flash_attn_varlen_func)


def test_a_window_past_every_request_is_open():
    assert problem_of(window_size=(MOST, 5)).window_left == -1
    assert problem_of(window_size=(1 << 40, 1 << 40)).window_right == -1
    assert problem_of(window_size=(MOST - 1, 5)).window_left == MOST - 1


def test_the_product_of_scales_is_one_of_float32():
    args = paged()
    args.update(k=args["k"].astype(np.uint8), v=args["v"].astype(np.uint8))
    describe_call(**args, softmax_scale=1e30, k_descale=1e8)
    with pytest.raises(ValueError, match=r"softmax_scale \* k_descale=.* finite in float32"):
        describe_call(**args, softmax_scale=1e30, k_descale=1e9)
    with pytest.raises(ValueError, match=r"v_descale=1e\+39 must be finite in float32"):
        describe_call(**args, v_descale=1e39)


def test_bounds_state_no_more():
    sizes = {"batch_size": 1, "num_heads_q": 1, "num_heads_kv": 1, "headdim": 64}
    assert AttentionBounds(
        **sizes, max_seqlen_q=1, max_seqlen_k=MOST, num_splits=1 << 40
    ).problem().num_splits == MOST  # fmt: skip
    with pytest.raises(ValueError, match="a request has at most 1073741824 tokens"):
        AttentionBounds(**sizes, max_seqlen_q=1, max_seqlen_k=MOST + 1)
