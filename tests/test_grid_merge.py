"""vLLM's grid of merges: 2592 of them on a GPU, a share on NumPy.

A tenth of the LSEs is +inf on one side, never on both. The reference is the merge in float64,
written for whole arrays so that the largest (4096 tokens, 64 heads of 256) take no minutes; it is
itself held against the oracle of `cupyflash.testing`.
"""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from conftest import Path

from cupyflash import merge_attn_states
from cupyflash.testing import DTYPES, merge_oracle
from cupyflash.testing.rounding import half_ulp

TOKENS, HEADS = (256, 512, 613, 1024, 1536, 4096), (4, 8, 16, 32, 48, 64)
DIMS, KINDS = (32, 48, 64, 96, 128, 256), ("fp32", "fp16", "bf16")
SPLITS, FP8 = (None, 128), (False, True)
SCALE = 0.05  # of outputs in e4m3
SHARE = [p for i, p in enumerate(product(HEADS[:4], DIMS, KINDS)) if i % 7 == 0]


def states(path, tokens, heads, dim, kind, seed=0):
    """Two states; drawn where they are used, since the largest have 67 million values."""
    xp, rng = path.xp, path.xp.random.default_rng(seed)
    outs = [
        rng.standard_normal((tokens, heads, dim), dtype=xp.float32).astype(DTYPES[kind])
        for _ in range(2)
    ]
    lses = [5 * rng.standard_normal((heads, tokens), dtype=xp.float32) for _ in range(2)]
    side = rng.random((heads, tokens), dtype=xp.float32)
    lses[0][side < 0.05] = np.inf
    lses[1][side > 0.95] = np.inf
    return outs, lses


def merged(xp, outs, lses, split, kind):
    """The merge in float64 or float32: out [tokens, heads, dim], lse [heads, tokens]."""
    lses = [xp.where(lse == np.inf, -np.inf, lse).astype(kind) for lse in lses]
    if split is not None:
        lses[0][:, split:] = -np.inf
    top = xp.maximum(*lses)
    shift = xp.where(top == -np.inf, 0, top)
    weights = [xp.exp(lse - shift) for lse in lses]
    total = weights[0] + weights[1]
    safe = xp.where(total == 0, 1, total)
    out = sum(
        (w / safe).T[..., None] * own.astype(np.float32).astype(kind)
        for w, own in zip(weights, outs, strict=True)
    )
    return out, xp.where(total == 0, -np.inf, shift + xp.log(safe))


def bounded(xp, found, right, low, kind):
    """Whether values are off by at most twice the float32 error and half an ulp; -inf exactly."""
    found, low = (x if x.itemsize > 2 else x.astype(np.float32) for x in (found, low))
    some = xp.isfinite(right)
    if bool((some != xp.isfinite(found)).any()):
        return False
    right = xp.where(some, right, 0)
    error, allowed = (
        float(xp.abs(xp.where(some, x.astype(np.float64), 0) - right).max()) for x in (found, low)
    )
    return error <= 2 * allowed + half_ulp(float(xp.abs(right).max()), np.dtype(kind))


def check(path, tokens, heads, dim, kind, split, fp8):
    xp = path.xp
    outs, lses = states(path, tokens, heads, dim, kind)
    out = xp.full(outs[0].shape, 0x7F if fp8 else np.nan, np.uint8 if fp8 else np.float32)
    out = out if fp8 else out.astype(DTYPES[kind])
    lse = xp.full(lses[0].shape, np.nan, np.float32)
    scale = path.array([SCALE], np.float32) if fp8 else None
    merge_attn_states(
        out, outs[0], lses[0], outs[1], lses[1], lse, prefill_tokens_with_context=split,
        output_scale=scale,
    )  # fmt: skip
    right, low = (merged(xp, outs, lses, split, each) for each in (np.float64, np.float32))
    where = f"{tokens} tokens, {heads} heads of {dim}, {kind}, split {split}, fp8 {fp8}"
    assert bounded(xp, lse, right[1], low[1], np.float32), where
    if fp8:
        error = float(xp.abs(low[0] - right[0]).max())
        assert in_e4m3(path, out, right[0], error), where
    else:
        assert bounded(xp, out, right[0], low[0], DTYPES[kind]), where


def in_e4m3(path, out, right, error):
    """Whether each value lies within half a step of its own magnitude, saturated at 448."""
    xp = path.xp
    table = path.array(
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )
    found, wanted = table[out], xp.clip(right / SCALE, -448, 448)
    exponent = xp.floor(xp.log2(xp.maximum(xp.abs(wanted), 2.0**-6)))
    # The quotient is rounded to float32 before it is rounded to e4m3.
    allowed = 2.0 ** (exponent - 4) + 2 * error / SCALE + half_ulp(448, np.dtype(np.float32))
    return bool((xp.abs(found - wanted) <= allowed).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "kind"), list(product(HEADS, DIMS, KINDS)))
def test_the_grid(heads, dim, kind):
    """24 of the 2592 cases."""
    for tokens, split, fp8 in product(TOKENS, SPLITS, FP8):
        check(Path("gpu"), tokens, heads, dim, kind, split, fp8)


@pytest.mark.parametrize(("heads", "dim", "kind"), SHARE)
def test_a_share_of_the_grid_on_numpy(heads, dim, kind):
    tokens = TOKENS[(heads + dim // 16) % 3]
    for split, fp8 in product(SPLITS, FP8):
        check(Path("numpy"), tokens, heads, dim, kind, split, fp8)


def test_the_share_covers_the_grid():
    assert len(TOKENS) * len(HEADS) * len(DIMS) * len(KINDS) * len(SPLITS) * len(FP8) == 2592
    assert {dim for _, dim, _ in SHARE} == set(DIMS)
    assert {kind for *_, kind in SHARE} == set(KINDS)


@pytest.mark.parametrize("split", SPLITS)
def test_the_reference_is_the_oracle(split):
    path = Path("numpy")
    outs, lses = states(path, 200, 2, 8, "fp32")
    found = merged(np, outs, lses, split, np.float64)
    cut = len(outs[0]) if split is None else split
    right = merge_oracle(*((out[:cut], lse[:, :cut]) for out, lse in zip(outs, lses, strict=True)))
    np.testing.assert_allclose(found[0][:cut], right[0], atol=1e-13)
    np.testing.assert_allclose(found[1][:, :cut], right[1], atol=1e-13)
    own = np.isposinf(lses[1][:, cut:])
    np.testing.assert_array_equal(np.isneginf(found[1][:, cut:]), own)
    np.testing.assert_array_equal(found[1][:, cut:][~own], lses[1][:, cut:][~own])


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_two_empty_states_are_one(merge_path, dtype):
    if merge_path.name != "numpy" and dtype == "fp32":
        dtype = "fp16"
    shape, none = (6, 8, 128), np.full((8, 6), -np.inf, np.float32)
    outs = [merge_path.array(np.full(shape, np.nan, DTYPES[dtype])) for _ in range(3)]
    lse = merge_path.array(np.zeros_like(none))
    merge_attn_states(
        outs[2], outs[0], merge_path.array(none), outs[1], merge_path.array(none), lse
    )
    assert (merge_path.host(outs[2]).astype(np.float32) == 0).all()
    assert np.isneginf(merge_path.host(lse)).all()
