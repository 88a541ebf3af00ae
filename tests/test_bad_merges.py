"""Merges refuse bad input: the value, the rule and what would work; nothing is written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupyflash

BF16 = np.dtype(ml_dtypes.bfloat16)


def merge_args():
    state, lse = np.ones((3, 2, 8), np.float16), np.zeros((2, 3), np.float32)
    output = np.full((3, 2, 8), 7, np.float16)
    return {
        "output": output, "prefix_output": state, "prefix_lse": lse, "suffix_output": state,
        "suffix_lse": lse,
    }  # fmt: skip


MERGE = [
    ("output", None, TypeError, "output is None"),
    ("output", lambda o: o[0], ValueError, r"it must be \[tokens, Hq, D\]"),
    (
        "output",
        lambda o: o.astype(np.float32),
        TypeError,
        "for states in fp16 use the same, or e4m3",
    ),
    (
        "output",
        lambda o: o.view(np.uint8)[..., :8],
        ValueError,
        "output is e4m3 and needs output_sc",
    ),
    ("prefix_output", None, TypeError, r"prefix_output is None; it must be an array \[3, 2, 8\]"),
    ("prefix_output", lambda p: p[:2], ValueError, r"must be \[3, 2, 8\], of the output"),
    ("suffix_output", lambda s: s.astype(BF16), TypeError, "suffix_output bfloat16; use one of"),
    (
        "suffix_output",
        lambda s: s.repeat(2, 2)[..., ::2],
        ValueError,
        "suffix_output .* contiguous",
    ),
    ("prefix_lse", lambda x: x.T, ValueError, r"prefix_lse .* must be \[2, 3\], \[Hq, tokens\]"),
    ("suffix_lse", lambda x: x.astype(np.float64), TypeError, "suffix_lse is float64"),
    ("output_lse", np.zeros((2, 3)), TypeError, "output_lse is float64; it must be float32"),
    ("output_lse", np.broadcast_to(np.float32(0), (2, 3)), ValueError, "its elements share memory"),
    ("s_aux", np.zeros(3, "f4"), ValueError, r"s_aux has shape \(3,\); it must be \[2\]"),
    ("output_scale", 1.0, ValueError, "belongs to an e4m3 output, not fp16; drop it"),
    ("prefill_tokens_with_context", -1, ValueError, "prefill_tokens_with_context=-1"),
    ("stream", 0, ValueError, "stream given, but NumPy arrays"),
]


@pytest.mark.parametrize(("name", "change", "error", "words"), MERGE)
def test_merges(name, change, error, words):
    args = merge_args()
    output = args["output"]
    args[name] = change(args[name]) if callable(change) else change
    with pytest.raises(error, match=words):
        cupyflash.merge_attn_states(**args)
    assert (output == 7).all()


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        (0.0, ValueError, "output_scale=0.0 must be positive"),
        (np.ones(2, np.float32), TypeError, r"output_scale is float32 \(2,\); .* float32 \[1\]"),
        (np.ones(1), TypeError, "output_scale is float64"),
        ("1", TypeError, "output_scale is str"),
    ],
)
def test_scales_of_merges(scale, error, words):
    args = merge_args()
    args.update(output=np.zeros((3, 2, 8), np.uint8), output_scale=scale)
    with pytest.raises(error, match=words):
        cupyflash.merge_attn_states(**args)
