"""The 8-bit Hopper prefill with its last tiles cut into pieces, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from graphs import capture
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import bits, check_repeats
from tails import cut_tails, even_cases

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.testing import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
E4M3 = {"q_type": "e4m3", "kv_type": "e4m3"}
MASKS = {"all": {}, "causal": {"causal": True}, "window": {"window_size": (400, 0)},
         "both": {"window_size": (20, 30), "sink": True}}  # fmt: skip


@settings(max_examples=50)
@given(case=even_cases(), left=st.integers(1, 40), cut=st.integers(2, 9), lse=st.booleans())
@pytest.mark.parametrize("share", range(4))
def test_any_case(case, left, cut, lse, share):
    import cupy

    options = {"fa_version": 3, "return_softmax_lse": lse}
    with cut_tails(left, cut):
        check_repeats(case.make(cupy), flash_attn_varlen_func, {"p_dtype": "e4m3"}, **options)


@pytest.mark.parametrize("pattern", ["normal", "spiky", "outlier", "one_hot"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lse", [False, True])
def test_long_requests(lse, name, head_dim, pattern):
    import cupy

    case = Case(lengths=((300, 2500), (300, 900)), group_size=4, page_size=16, head_dim=head_dim,
                pattern=pattern, descale=True, **MASKS[name], **E4M3)  # fmt: skip
    with cut_tails(30, 5):
        case.make(cupy).check(flash_attn_varlen_func, fa_version=3, return_softmax_lse=lse)


@pytest.mark.parametrize("cut", [2, 3, 7])
def test_results_repeat(cut):
    import cupy

    case = Case(lengths=((400, 3000), (400, 3000)), num_heads_kv=20, head_dim=128, **E4M3)
    inputs = case.make(cupy)
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    options = {"out": out, "lse": lse, "return_softmax_lse": True, "fa_version": 3}
    with cut_tails(50, cut):
        first = bits(inputs.call(flash_attn_varlen_func, fa_version=3))
        right, differs = (out.copy(), lse.copy()), cupy.zeros((), cupy.bool_)
        for _ in range(300):
            flash_attn_varlen_func(**inputs.args, **options)
            differs |= (out.view(cupy.uint16) != right[0].view(cupy.uint16)).any()
            differs |= (lse.view(cupy.uint32) != right[1].view(cupy.uint32)).any()
        assert not bool(differs)
        assert bits(inputs.call(flash_attn_varlen_func, fa_version=3)) == first


def test_a_graph_is_replayed(path_of_gpu):
    import cupy

    case = Case(lengths=((512, 2000),), num_heads_kv=36, head_dim=128, **E4M3)
    inputs = case.make(cupy)
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    options = {"out": out, "lse": lse, "return_softmax_lse": True, "fa_version": 3}
    graph = capture(path_of_gpu, lambda: flash_attn_varlen_func(**inputs.args, **options))
    right = out.get().tobytes(), lse.get().tobytes()
    for _ in range(20):
        out[: case.q_lens[0]], lse[:, : case.q_lens[0]] = 0, 0
        graph.replay()
        assert (out.get().tobytes(), lse.get().tobytes()) == right


@pytest.fixture
def path_of_gpu():
    import cupy

    return SimpleNamespace(name="gpu", xp=cupy)


def test_the_plan_cuts_a_round_that_is_hardly_filled():
    import cupy

    case = Case(lengths=((512, 2000),), num_heads_kv=36, head_dim=128, **E4M3)
    inputs = case.make(cupy)
    found = inputs.call(flash_attn_varlen_func, fa_version=3)
    whole = inputs.call(flash_attn_varlen_func, fa_version=3, num_splits=1)
    assert bits(found) != bits(whole)  # it is cut
    for one, other in zip(found, whole, strict=True):
        one, other = (np.nan_to_num(array.astype(np.float32)) for array in (one, other))
        assert np.abs(one - other).max() < 4e-3 * np.abs(other).max()
