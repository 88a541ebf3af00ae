"""Public reports on arrays, scalars and bounds; docs/public_reports.md names them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, check, random_batch, run, starts
from foreign_arrays import Foreign

from cupyflash import flash_attn_varlen_func
from cupyflash.testing import Case

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_b76_the_bound_of_the_key_length_does_not_change_bits(path):
    args = arguments(
        path, *random_batch([1, 3], [500, 20], 4, 2, dtype=BF16), [1, 3], [500, 20], 16
    )
    results = [
        run(path, {**args, "max_seqlen_k": bound, "batch_invariant": True})
        for bound in (512, 131072)
    ]
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("scale", [0.5, np.float64(0.5), np.float32(0.5), np.array(0.5)])
def test_b83_a_scale_of_any_kind_of_number(path, scale):
    args = arguments(path, *random_batch([2], [30], dtype=BF16), [2], [30])
    right = check(path, {**args, "softmax_scale": 0.5})
    found = run(path, {**args, "softmax_scale": scale})
    np.testing.assert_array_equal(found[0], right[0])


def test_b83_a_scale_of_one_as_an_integer(path):
    args = arguments(path, *random_batch([2], [30], dtype=BF16), [2], [30])
    left, right = (run(path, {**args, "softmax_scale": scale}) for scale in (1, 1.0))
    np.testing.assert_array_equal(left[0], right[0])


def test_b88_arrays_through_dlpack(path):
    args = arguments(path, *random_batch([2], [30], dtype=np.float16), [2], [30])
    right = run(path, args)
    foreign = {n: Foreign(a) if hasattr(a, "dtype") else a for n, a in args.items()}
    out, lse = flash_attn_varlen_func(**foreign, return_softmax_lse=True)
    np.testing.assert_array_equal(path.host(out).astype(np.float64), right[0])
    np.testing.assert_array_equal(path.host(lse), right[1])


def test_b88_fp8_through_dlpack_is_uint8_with_a_name(path):
    inputs = Case(lengths=((2, 20),), page_size=16, q_type="fp16", kv_type="e5m2").make(path.xp)
    right = inputs.call(flash_attn_varlen_func)
    args = {**inputs.args, "k": Foreign(inputs.args["k"]), "v": Foreign(inputs.args["v"])}
    out = flash_attn_varlen_func(**args)
    assert path.host(out)[:2].tobytes() == right[0][:2].tobytes()
    other = flash_attn_varlen_func(**{**args, "fp8_dtype": "e4m3"})
    assert path.host(other)[:2].tobytes() != right[0][:2].tobytes()


def test_b88_arrays_without_elements(path):
    empty = np.zeros((0, 2, 64), np.float16)
    args = arguments(path, empty, empty, empty, [0, 0], [0, 0])
    out, lse = flash_attn_varlen_func(**args, return_softmax_lse=True)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)


@pytest.mark.parametrize("what", [[1.0], "q", object(), 3])
def test_b88_what_is_no_array_is_a_type_error(path, what):
    args = arguments(path, *random_batch([2], [3], dtype=np.float16), [2], [3])
    for name in ("q", "k", "cu_seqlens_q"):
        with pytest.raises(TypeError, match=name):
            flash_attn_varlen_func(**{**args, name: what})


def test_b88_bfloat16_as_plain_bits_is_refused(path):
    args = arguments(path, *random_batch([2], [3], dtype=BF16), [2], [3])
    args["cu_seqlens_q"] = path.array(starts([2]))
    bits = {n: path.array(path.host(args[n]).view(np.uint16)) for n in "qkv"}
    with pytest.raises(TypeError, match="uint16"):
        flash_attn_varlen_func(**{**args, **bits})
