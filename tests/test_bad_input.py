"""Attention refuses bad input: the value, the rule and what would work; nothing is written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_problem import paged

import cupyflash
from cupyflash.attention import describe_call
from cupyflash.runtime.rules.numbers import flag, non_negative, number

BF16 = np.dtype(ml_dtypes.bfloat16)


def changed(name, change):
    """Arguments of a good paged call with one of them changed."""
    args = paged()
    args[name] = change(args.get(name)) if callable(change) else change
    return args


ATTENTION = [
    ("q", None, TypeError, r"q is None; it must be an array \[total_q, Hq, D\]"),
    ("q", lambda q: q[0], ValueError, r"q has shape \(6, 64\); it must be \[total_q, Hq, D\]"),
    ("q", lambda q: q.astype(np.int8), TypeError, "q is int8; use float16, bfloat16, float32"),
    ("q", lambda q: q.astype(BF16), TypeError, "q is bf16, k and v are fp16; they must be"),
    ("q", lambda q: q[..., ::2], ValueError, r"q has shape .* strides .* must be contiguous"),
    ("q", lambda q: q[:, :5], ValueError, "5 query heads and 2 KV heads"),
    ("q", lambda q: q[:, :0], ValueError, "0 query heads"),
    ("q", lambda q: q[..., :56], ValueError, "q has head size 56 and k 64"),
    ("k", lambda k: k[0], ValueError, r"k has shape .* \[num_blocks, block_size, Hk, D\]"),
    ("k", lambda k: k[:, :0], ValueError, r"k is \[5, 0, 2, D\] and v \[5, 16, 2, Dv\]"),
    ("v", lambda v: v[:4], ValueError, r"k is \[5, 16, 2, D\] and v \[4, 16, 2, Dv\]"),
    ("v", lambda v: v[:, :, :1], ValueError, r"v \[5, 16, 1, Dv\]"),
    ("v", lambda v: v[..., :20], ValueError, "head size 20 of v: .* of 8 .* nearest is 24"),
    ("v", lambda v: v.astype(np.float32), TypeError, "k is float16 and v is float32"),
    ("cu_seqlens_q", None, TypeError, "cu_seqlens_q is None; .* int32"),
    ("cu_seqlens_q", lambda c: c.astype(np.int64), TypeError, "cu_seqlens_q is int64; .* int32"),
    ("cu_seqlens_q", lambda c: c[:0], ValueError, r"at least \[0\]"),
    ("cu_seqlens_q", lambda c: c[None], ValueError, "one dimension"),
    ("cu_seqlens_q", lambda c: np.repeat(c, 2)[::2], ValueError, "cu_seqlens_q must be contiguous"),
    ("cu_seqlens_k", lambda _: np.zeros(3, np.int32), ValueError, "exclude each other; drop"),
    ("seqused_k", None, ValueError, "block_table without seqused_k: pass the number of keys"),
    ("seqused_k", lambda s: s[:1], ValueError, r"seqused_k has shape \(1,\).*2 requests.*\[2\]"),
    ("seqused_k", lambda s: s.astype(np.uint32), TypeError, "seqused_k is uint32; .* int32"),
    ("block_table", lambda t: t[:1], ValueError, r"2 requests; it must be \[2, max_blocks\]"),
    ("block_table", lambda t: t[0], ValueError, r"must be \[batch, max_blocks\]"),
    ("block_table", lambda t: t.astype(np.int64), TypeError, "block_table is int64; .* int32"),
    ("block_table", lambda t: t.repeat(2, 1)[:, ::2], ValueError, "contiguous rows; the row"),
    ("block_table", None, ValueError, "cu_seqlens_k is missing: .* paged cache needs block_table"),
    ("max_seqlen_q", -1, ValueError, "max_seqlen_q=-1 must be at least 0"),
    ("max_seqlen_q", 2.5, TypeError, "max_seqlen_q is float; pass a Python or NumPy integer"),
    ("max_seqlen_k", np.array([3]), TypeError, r"max_seqlen_k has shape \(1,\); pass one integer"),
    ("max_seqlen_q", 2, ValueError, "max_seqlen_q=2, but request 1 has 3; it must be at least 3"),
    ("max_seqlen_k", 19, ValueError, "max_seqlen_k=19, but request 0 has 20"),
    ("max_seqlen_k", (1 << 30) + 1, ValueError, "a request has at most 1073741824 tokens"),
    ("max_seqlen_q", 1 << 40, ValueError, "a request has at most 1073741824 tokens"),
    ("num_splits", -1, ValueError, "num_splits=-1 must be at least 0"),
    ("num_splits", True, TypeError, "num_splits is bool"),
    ("causal", np.ones(2, np.int32), TypeError, "causal is ndarray; .* for all requests"),
    ("window_size", (-1, -3), ValueError, r"window_size=\(-1, -3\).* nearest is \(-1, -1\)"),
    ("window_size", 4, ValueError, "window_size=4 must be two integers"),
    ("window_size", (4,), ValueError, "two integers"),
    ("window_size", (1.5, 0), ValueError, "two integers"),
    ("softcap", -2.0, ValueError, "softcap=-2.0 must be positive, or 0"),
    ("softcap", float("inf"), ValueError, "softcap=inf must be finite"),
    ("softcap", 1e31, ValueError, r"from 1e-30 to 1e\+30; the nearest is 1e\+30"),
    ("softcap", 1e-31, ValueError, "the nearest is 1e-30"),
    ("softmax_scale", -1e39, ValueError, r"softmax_scale=-1e\+39 must be finite in float32"),
    ("softmax_scale", float("nan"), ValueError, "softmax_scale=nan must be finite"),
    ("softmax_scale", np.ones(2), TypeError, r"softmax_scale has shape \(2,\); pass one number"),
    ("softmax_scale", "1", TypeError, "softmax_scale is str"),
    ("alibi_slopes", np.ones(6), TypeError, "alibi_slopes is float64; it must be float32"),
    ("alibi_slopes", np.ones((3, 6), "f4"), ValueError, r"must be \[6\] or \[2, 6\]"),
    ("alibi_slopes", np.ones(12, "f4")[::2], ValueError, "alibi_slopes .* contiguous"),
    ("s_aux", np.ones(6), TypeError, "s_aux is float64; use float32, float16 or bfloat16"),
    ("s_aux", np.ones(2, "f4"), ValueError, r"s_aux has shape \(2,\); it must be \[6\]"),
    ("out", np.zeros((4, 6, 32), "f2"), ValueError, r"out has shape .* it must be \[4, 6, 64\]"),
    ("out", np.zeros((4, 6, 64), "f4"), TypeError, "out is float32; for q in fp16 it must be fp16"),
    ("out", np.zeros((4, 6, 128), "f2")[..., ::2], ValueError, "out .* contiguous"),
    ("out", np.broadcast_to(np.zeros(64, "f2"), (4, 6, 64)), ValueError, "elements share memory"),
    ("lse", np.zeros((4, 6), "f4"), ValueError, r"lse has shape \(4, 6\); it must be \[6, 4\]"),
    ("lse", np.zeros((6, 4), "f8"), TypeError, "lse is float64; it must be float32"),
    ("q_descale", 2.0, ValueError, "q_descale given, but q is fp16; .* drop it"),
    ("v_descale", np.ones((2, 2), "f4"), ValueError, "v_descale given, but v is fp16"),
    ("fp8_dtype", "e3m4", ValueError, "fp8_dtype='e3m4' is not an fp8 format; use one of e4m3"),
    ("fp8_dtype", ["e4m3"], TypeError, "fp8_dtype is list; it must be a string"),
    ("q_fp8_dtype", "bf16", ValueError, "q_fp8_dtype='bf16' is not an fp8 format"),
    ("dropout_p", 0.1, ValueError, "dropout_p=0.1: inference has no dropout; use 0"),
    ("return_attn_probs", True, ValueError, "use return_softmax_lse=True"),
    ("q_v", np.zeros((4, 6, 64)), TypeError, "q_v is float64 and q fp16; .* one dtype"),
    ("q_v", np.zeros((4, 6, 72), np.float16), ValueError, r"q_v .*\(4, 6, 72\).*\[4, 6, 64\]"),
    ("q_v", np.zeros((4, 64), np.float16), ValueError, r"it must be \[total_q, Hq, Dv\]"),
    ("q_v", np.zeros((4, 6, 64), np.float16), ValueError, "softmax_scale is None: with q_v"),
    ("cp_world_size", 2, ValueError, "cp_tot_seqused_k is None with cp_world_size=2"),
    ("cp_world_size", 0, ValueError, "cp_rank=0 must be one of cp_world_size=0"),
    ("cp_rank", 1, ValueError, "cp_rank=1 must be one of cp_world_size=1"),
    ("cp_tot_seqused_k", np.ones(2, "i4"), ValueError, "is given with cp_world_size=1"),
    ("fa_version", 3, ValueError, "fa_version=3: versions are GPU kernels, .* use None"),
    ("stream", 0, ValueError, "stream given, but NumPy arrays"),
    ("scheduler_metadata", np.zeros(2, "i4"), TypeError, "scheduler_metadata is int32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "words"), ATTENTION)
def test_attention(name, change, error, words):
    args = changed(name, change)
    args.setdefault("out", np.full((4, 6, 64), 7, np.float16))
    args.setdefault("lse", np.full((6, 4), 7, np.float32))
    with pytest.raises(error, match=words):
        cupyflash.flash_attn_varlen_func(**args)
    for output in ("out", "lse"):
        if name != output:
            assert (args[output] == 7).all()


def test_a_block_of_no_tokens():
    args = paged()
    args.update(k=args["k"][:, :0], v=args["v"][:, :0])
    with pytest.raises(ValueError, match="must hold at least 1 token"):
        describe_call(**args)


@pytest.mark.parametrize("size", [0, 4, 100, 264, 300])
def test_head_sizes_name_the_nearest(size):
    args = paged(dims=(size, size))
    nearest = min(max(8, -(-size // 8) * 8), 256)
    with pytest.raises(ValueError, match=f"head size {size} of q and k: .* nearest is {nearest}"):
        describe_call(**args)


@pytest.mark.parametrize("size", [8, 40, 72, 112, 120, 160, 224, 256])
def test_every_multiple_of_8_is_taken(size):
    assert describe_call(**paged(dims=(size, size))).problem.head_dim == size


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 2), r"k_descale has shape \(1, 2\); it must be \(2, 2\)"),
        ((2,), r"\(2,\); it must be \(2, 2\)"),
        ((2, 2, 1), "or a number"),
    ],
)
def test_descales_of_another_size_show_both_shapes(shape, words):
    args = paged()
    args.update(k=args["k"].astype(np.uint8), v=args["v"].astype(np.uint8))
    with pytest.raises(ValueError, match=words):
        describe_call(**args, k_descale=np.ones(shape, np.float32))
    with pytest.raises(TypeError, match="k_descale is float64; it must be float32"):
        describe_call(**args, k_descale=np.ones((2, 2)))


def test_partial_descales_are_taken():
    args = paged()
    args.update(k=args["k"].astype(np.uint8), v=args["v"].astype(np.uint8))
    one = np.ones((2, 2), np.float32)
    expected = cupyflash.flash_attn_varlen_func(**args, k_descale=one, v_descale=one)
    np.testing.assert_array_equal(cupyflash.flash_attn_varlen_func(**args, k_descale=one), expected)


def test_float32_is_for_numpy_only():
    from test_fa_version import gpu

    args = paged(dtype=np.float32)
    with gpu((9, 0)), pytest.raises(TypeError, match="float32 attention runs on NumPy arrays only"):
        describe_call(**args)


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.array([True])])
def test_flags_are_true_or_false(value):
    with pytest.raises(TypeError, match="it must be True or False"):
        flag("causal", value)
    assert flag("causal", np.bool_(True)) is True


def test_numbers_on_the_host():
    assert non_negative("n", np.array(3)) == 3
    assert number("x", np.float16(0.5)) == 0.5
    with pytest.raises(ValueError, match="must be finite"):
        number("x", 10**400)
    for value in (None, 1j, np.array("a"), object()):
        with pytest.raises(TypeError, match="pass a Python or NumPy number"):
            number("x", value)
