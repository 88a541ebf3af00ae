"""The merge of attention states: docs/contracts.md, on every path that has it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import merge_attn_states
from cupyflash.testing import DTYPES, assert_within, expect_merge, place, saturate
from cupyflash.testing.poison import poison_of

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
KINDS = ["fp32", "fp16", "bf16"]


def state(rng, tokens, heads, dim, kind="fp32", empty=0.2):
    """A state in which some rows are empty and hold NaN."""
    out = rng.standard_normal((tokens, heads, dim)).astype(DTYPES[kind])
    lse = rng.uniform(-20, 20, (heads, tokens)).astype(np.float32)
    gone = rng.random((heads, tokens)) < empty
    lse[gone] = rng.choice([-np.inf, np.inf], gone.sum())
    out[gone.T] = np.nan
    return out, lse


def merge(path, prefix, suffix, kind=None, layouts=("NHD", "NHD", "NHD"), **options):
    """out and lse, merged into poisoned arrays whose padding is checked."""
    dtype = prefix[0].dtype if kind is None else kind
    empty = (np.full(prefix[0].shape, poison_of(dtype), dtype), np.full_like(prefix[1], np.nan))
    outs, lses = [], []
    for pad, (array, layout) in enumerate(zip((empty, prefix, suffix), layouts, strict=True)):
        outs.append(place(array[0], layout, xp=path.xp, pad=pad))
        flat = "NHD" if layout == "HND" else layout
        lses.append(place(array[1], flat, xp=path.xp, pad=pad))
    for name in ("s_aux", "output_scale"):
        if isinstance(options.get(name), np.ndarray):
            options[name] = path.array(options[name])
    merge_attn_states(
        outs[0].view, outs[1].view, lses[1].view, outs[2].view, lses[2].view, lses[0].view,
        **options,
    )  # fmt: skip
    for placed in (*outs, *lses):
        placed.assert_padding_intact()
    return path.host(outs[0].view), path.host(lses[0].view)


LAYOUT = st.sampled_from(["NHD", "strided", "odd"])


@given(
    tokens=st.integers(0, 40), heads=st.integers(1, 9), dim=st.sampled_from([64, 8, 128, 40, 256]),
    kind=st.sampled_from(KINDS), layouts=st.tuples(LAYOUT, LAYOUT, LAYOUT), sink=st.booleans(),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_merge_of_any_strides(merge_path, tokens, heads, dim, kind, layouts, sink, seed):
    rng = np.random.default_rng(seed)
    prefix, suffix = (state(rng, tokens, heads, dim, kind) for _ in range(2))
    sinks = rng.standard_normal(heads).astype(np.float32) if sink else None
    found = merge(merge_path, prefix, suffix, layouts=layouts, s_aux=sinks)
    expect_merge(prefix, suffix, out_dtype=kind, s_aux=sinks).check(*found)


def test_heads_outside_of_tokens(merge_path):
    rng = np.random.default_rng(5)
    prefix, suffix = (state(rng, 9, 4, 64, "bf16") for _ in range(2))
    found = merge(merge_path, prefix, suffix, layouts=("HND", "NHD", "HND"))
    expect_merge(prefix, suffix, out_dtype="bf16").check(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alias", ["prefix", "suffix"])
def test_output_may_be_an_input(merge_path, kind, alias):
    rng = np.random.default_rng(2)
    prefix, suffix = (state(rng, 50, 3, 64, kind) for _ in range(2))
    right = merge(merge_path, prefix, suffix)
    arrays = {
        "prefix_output": prefix[0], "prefix_lse": prefix[1],
        "suffix_output": suffix[0], "suffix_lse": suffix[1],
    }  # fmt: skip
    given = {name: merge_path.array(array) for name, array in arrays.items()}
    merge_attn_states(given[f"{alias}_output"], output_lse=given[f"{alias}_lse"], **given)
    for name, expected in (("output", right[0]), ("lse", right[1])):
        assert merge_path.host(given[f"{alias}_{name}"]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lses", [(-np.inf, -np.inf), (np.inf, -np.inf), (np.inf, np.inf)])
def test_both_empty_is_empty(merge_path, kind, lses):
    prefix, suffix = (
        (np.full((3, 2, 8), np.nan, DTYPES[kind]), np.full((2, 3), lse, np.float32)) for lse in lses
    )
    out, lse = merge(merge_path, prefix, suffix)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("empty", [-np.inf, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_an_empty_side_passes_the_other_through_bit_by_bit(merge_path, empty, side):
    rng = np.random.default_rng(3)
    full = state(rng, 5, 2, 64, "bf16", empty=0)
    gone = (np.full_like(full[0], np.nan), np.full_like(full[1], empty))
    out, lse = merge(merge_path, *((gone, full) if side == 0 else (full, gone)))
    assert out.tobytes() == full[0].tobytes()
    assert lse.tobytes() == full[1].tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 7, 9])
def test_tokens_without_a_prefix_take_the_suffix(merge_path, count):
    rng = np.random.default_rng(4)
    prefix, suffix = (state(rng, 7, 2, 64, empty=0) for _ in range(2))
    out, lse = merge(merge_path, prefix, suffix, prefill_tokens_with_context=count)
    both = merge(merge_path, prefix, suffix)
    np.testing.assert_array_equal(out[:count], both[0][:count])
    np.testing.assert_array_equal(lse[:, :count], both[1][:, :count])
    np.testing.assert_array_equal(out[count:], suffix[0][count:])
    np.testing.assert_array_equal(lse[:, count:], suffix[1][:, count:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.05, np.array([0.001], np.float32)])
def test_output_in_e4m3_is_divided_by_its_scale_and_saturates(merge_path, kind, scale):
    rng = np.random.default_rng(6)
    prefix, suffix = (state(rng, 20, 3, 64, kind) for _ in range(2))
    found, lse = merge(merge_path, prefix, suffix, np.dtype(np.uint8), output_scale=scale)
    expected = expect_merge(prefix, suffix, out_dtype="fp32")
    number = float(np.asarray(scale).item())
    right = np.clip(expected.out / number, -448, 448)
    baseline = saturate(expected.out_baseline / np.float32(number), E4M3)
    assert_within(found.view(E4M3), right, baseline)
    expected.check(expected.out.astype(np.float32), lse)


def test_a_sink_is_merged_once(merge_path):
    zero, one = np.zeros((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32)
    lses = [np.log([[n]]).astype(np.float32) for n in (2.0, 8.0)]
    sinks = np.log([10.0]).astype(np.float32)
    out, lse = merge(merge_path, (zero, lses[0]), (one, lses[1]), s_aux=sinks)
    np.testing.assert_allclose(out, 0.4, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(20), rtol=1e-6)


def test_large_merges_are_cut_without_a_seam(merge_path):
    rng = np.random.default_rng(7)
    prefix, suffix = (state(rng, 3000, 8, 64) for _ in range(2))
    found = merge(merge_path, prefix, suffix)
    part = slice(1000, 1100)
    piece = [(out[part], lse[:, part]) for out, lse in (prefix, suffix)]
    few = merge(merge_path, *piece)
    assert found[0][part].tobytes() == few[0].tobytes()
    assert found[1][:, part].tobytes() == few[1].tobytes()


BAD = {
    "states of two types": (1, lambda a: a.astype(np.float16), {}, TypeError),
    "an output of another type": (0, lambda a: a.astype(np.float16), {}, TypeError),
    "lse of another shape": (2, lambda a: a[:, :-1], {}, ValueError),
    "lse in half precision": (2, lambda a: a.astype(np.float16), {}, TypeError),
    "states of two shapes": (3, lambda a: a[:, :1], {}, ValueError),
    "e4m3 without a scale": (0, lambda a: a.astype(np.uint8), {}, ValueError),
    "a scale without e4m3": (0, lambda a: a, {"output_scale": 1.0}, ValueError),
    "a scale of zero": (0, lambda a: a.astype(np.uint8), {"output_scale": 0.0}, ValueError),
    "a negative count": (0, lambda a: a, {"prefill_tokens_with_context": -1}, ValueError),
    "last stride of two": (3, lambda a: np.repeat(a, 2, axis=2)[..., ::2], {}, ValueError),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_merges_are_refused(merge_path, what):
    index, change, options, error = BAD[what]
    out, lse = np.full((3, 2, 8), 7, np.float32), np.full((2, 3), 7, np.float32)
    arrays = [out, out.copy(), lse, out.copy(), lse.copy()]
    arrays[index] = change(arrays[index])
    given = [merge_path.array(array) for array in arrays]
    if what == "last stride of two":
        given[index] = merge_path.xp.repeat(merge_path.array(out), 2, axis=2)[..., ::2]
    with pytest.raises(error):
        merge_attn_states(*given, **options)
    assert (merge_path.host(given[0]).astype(np.float32) == 7).all()
