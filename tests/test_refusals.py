"""What attention refuses: before any launch, with the reason, nothing written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, random_batch, starts

from cupyflash import flash_attn_varlen_func
from cupyflash.testing import Case

BF16 = np.dtype(ml_dtypes.bfloat16)
CASE = Case(
    lengths=((1, 37), (5, 20), (0, 9), (3, -1), (1, -1)), num_heads_kv=2, group_size=3,
    page_size=16, causal=True, q_type="bf16", kv_type="bf16",
)  # fmt: skip


def refused(path, args, error, words):
    """The call raises, names its reason, and leaves out and lse alone."""
    q, v = path.host(args["q"]), path.host(args["v"])
    kind = BF16 if q.dtype.itemsize == 1 else q.dtype
    given = {"out": path.array(np.full((*q.shape[:2], v.shape[-1]), 7, kind))}
    given["lse"] = path.array(np.full(q.shape[:2][::-1], 7, np.float32))
    with pytest.raises(error, match=words):
        flash_attn_varlen_func(**{**given, **args})
    for array in given.values():
        assert (path.host(array).astype(np.float32) == 7).all()


BAD = {
    "query of integers": ("q", lambda p, q: p.array(np.ones(q.shape, np.int32)), TypeError, "q is"),
    "query of float64": ("q", lambda p, q: p.array(np.ones(q.shape)), TypeError, "float64"),
    "keys of another type": (
        "k", lambda p, k: p.array(np.ones(k.shape, np.float16)), TypeError, "k is"),
    "last stride of two": (
        "q", lambda p, q: p.xp.repeat(q, 2, axis=2)[..., ::2], ValueError, "contiguous"),
    "heads that do not divide": (
        "q", lambda p, q: p.array(np.ones((12, 5, 64), BF16)), ValueError, "heads"),
    "head size of 20": ("v", lambda p, v: v[..., :20], ValueError, "20"),
    "dropout": ("dropout_p", 0.1, ValueError, "dropout"),
    "weights asked for": ("return_attn_probs", True, ValueError, "return_attn_probs"),
    "negative softcap": ("softcap", -1.0, ValueError, "softcap"),
    "no key lengths": ("seqused_k", None, ValueError, "seqused_k"),
    "lengths of the wrong size": ("seqused_k", lambda p, s: s[:-1], ValueError, "seqused_k"),
    "table of the wrong size": ("block_table", lambda p, t: t[:-1], ValueError, "block_table"),
    "table of int64": (
        "block_table", lambda p, t: p.array(p.host(t).astype(np.int64)), TypeError, "int32"),
    "negative bound": ("max_seqlen_k", -1, ValueError, "max_seqlen_k"),
    "sinks of the wrong size": (
        "s_aux", lambda p, _: p.array(np.ones(4, np.float32)), ValueError, "s_aux"),
    "slopes of the wrong size": (
        "alibi_slopes", lambda p, _: p.array(np.ones(4, np.float32)), ValueError, "alibi_slopes"),
    "output of another shape": (
        "out", lambda p, _: p.array(np.full((1, 6, 64), 7, BF16)), ValueError, "out"),
    "output of another type": (
        "out", lambda p, _: p.array(np.full((12, 6, 64), 7, np.float32)), TypeError, "out"),
    "lse in half precision": (
        "lse", lambda p, _: p.array(np.full((6, 12), 7, np.float16)), TypeError, "lse"),
    "an unknown version": ("fa_version", 7, ValueError, "fa_version"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused(path, what):
    name, value, error, words = BAD[what]
    args = CASE.make(path.xp).args
    args[name] = value(path, args.get(name)) if callable(value) else value
    refused(path, args, error, words)


def test_packed_keys_need_their_starts(path):
    args = CASE.replace(page_size=None).make(path.xp).args
    refused(path, {**args, "cu_seqlens_k": None}, ValueError, "cu_seqlens_k")
    refused(path, {**args, "cu_seqlens_k": args["cu_seqlens_k"][:-1]}, ValueError, "cu_seqlens_k")


@pytest.mark.gpu
def test_arrays_of_both_sides_are_refused():
    import cupy

    args = CASE.make().args
    with pytest.raises(TypeError, match="NumPy"):
        flash_attn_varlen_func(**{**args, "q": cupy.ones(args["q"].shape, cupy.float16)})


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0), (1.5, 0), (1,)])
def test_other_windows_are_refused(path, window):
    args = arguments(path, *random_batch([2], [4]), [2], [4], window_size=window)
    refused(path, args, ValueError, "window_size")


def test_an_unknown_fp8_spelling_is_refused(path):
    inputs = CASE.replace(kv_type="e4m3").make(path.xp)
    inputs.args["fp8_dtype"] = "e3m4"
    refused(path, inputs.args, ValueError, "e3m4")


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_descale_on_16_bit_data_is_refused(path, name):
    inputs = CASE.make(path.xp)
    inputs.args[name] = path.array(np.ones((5, 2), np.float32))
    refused(path, inputs.args, ValueError, name)


@pytest.mark.parametrize("scale", [np.ones(2), "1", float("nan"), None.__class__])
def test_other_softmax_scales_are_refused(path, scale):
    args = arguments(path, *random_batch([2], [9]), [2], [9], softmax_scale=scale)
    refused(path, args, (TypeError, ValueError), "softmax_scale")


@pytest.mark.gpu
def test_a_scale_on_the_gpu_is_refused():
    import cupy

    q = cupy.ones((1, 1, 64), cupy.float16)
    args = {"cu_seqlens_q": cupy.asarray(starts([1])), "cu_seqlens_k": cupy.asarray(starts([1]))}
    with pytest.raises(TypeError, match="softmax_scale"):
        flash_attn_varlen_func(
            q, q, q, max_seqlen_q=1, max_seqlen_k=1, softmax_scale=cupy.array(1.0), **args
        )
