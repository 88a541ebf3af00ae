"""What `describe` makes of a call, how often, and how fast."""

from __future__ import annotations

import timeit
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cupyflash.attention import describe_call
from cupyflash.runtime.arrays import ArraySpec, AttentionArrays, as_array, merge_leading, place
from cupyflash.runtime.call import prepare
from cupyflash.runtime.dtypes import BF16, E4M3, E5M2, FP16, FP32

E4M3_DTYPE = ml_dtypes.float8_e4m3fn


def paged(q_lens=(1, 3), kv_lens=(20, 9), heads=(6, 2), dims=(64, 64), dtype=np.float16, page=16):
    q = np.zeros((sum(q_lens), heads[0], dims[0]), dtype)
    return {
        "q": q,
        "k": np.zeros((5, page, heads[1], dims[0]), dtype),
        "v": np.zeros((5, page, heads[1], dims[1]), dtype),
        "max_seqlen_q": max(q_lens),
        "cu_seqlens_q": np.cumsum([0, *q_lens]).astype(np.int32),
        "max_seqlen_k": max(kv_lens),
        "seqused_k": np.array(kv_lens, np.int32),
        "block_table": np.zeros((len(q_lens), 3), np.int32),
    }


def problem_of(**changes):
    return describe_call(**{**paged(), **changes}).problem


def test_a_paged_call_is_described():
    p = describe_call(**paged(dims=(64, 32)), causal=True, num_splits=3).problem
    assert (p.batch, p.total_q, p.max_seqlen_q, p.max_seqlen_k) == (2, 4, 3, 20)
    assert (p.num_heads_q, p.num_heads_kv, p.group_size) == (6, 2, 3)
    assert (p.head_dim, p.head_dim_v, p.page_size, p.max_blocks) == (64, 32, 16, 3)
    assert (p.q_type, p.kv_type, p.out_type) == (FP16, FP16, FP16)
    assert (p.window_left, p.window_right, p.causal) == (-1, 0, True)
    assert (p.softmax_scale, p.softcap, p.num_splits) == (0.125, 0.0, 3)
    assert p.has_seqused_k
    assert not any((p.has_alibi, p.has_sink, p.has_q_descale, p.has_kv_descale, p.wants_lse))


def test_a_packed_call_is_described():
    args = paged()
    k = np.zeros((29, 2, 64), np.float16)
    args.update(
        k=k, v=k, seqused_k=None, block_table=None, cu_seqlens_k=np.array([0, 20, 29], "i4")
    )
    p = describe_call(**args).problem
    assert (p.page_size, p.max_blocks, p.has_seqused_k) == (None, 0, False)


def test_options_are_described():
    p = problem_of(
        alibi_slopes=np.ones((2, 6), np.float32), s_aux=np.ones(6, np.float32), softcap=30,
        softmax_scale=0.5, return_softmax_lse=True, batch_invariant=True,
    )  # fmt: skip
    assert (p.has_alibi, p.alibi_per_batch, p.has_sink) == (True, True, True)
    assert (p.softcap, p.softmax_scale, p.wants_lse, p.batch_invariant) == (30.0, 0.5, True, True)
    assert problem_of(lse=np.zeros((6, 4), np.float32)).wants_lse


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, False, (-1, -1)),
        (None, True, (-1, 0)),
        ((-1, -1), True, (-1, 0)),
        ([7, 3], False, (7, 3)),
        ((7, 3), True, (7, 0)),
        (np.array([4, 0]), False, (4, 0)),
    ],
)
def test_windows_are_described(window, causal, expected):
    p = problem_of(window_size=window, causal=causal)
    assert (p.window_left, p.window_right) == expected


@pytest.mark.parametrize(
    ("q", "kv", "names", "expected"),
    [
        (np.float32, np.float32, {}, (FP32, FP32, FP32)),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16, {}, (BF16, BF16, BF16)),
        (np.float16, np.uint8, {}, (FP16, E4M3, FP16)),
        (np.float16, np.uint8, {"fp8_dtype": "fp8_e5m2"}, (FP16, E5M2, FP16)),
        (np.uint8, np.uint8, {"q_fp8_dtype": "e4m3", "fp8_dtype": "e5m2"}, (E4M3, E5M2, BF16)),
        (np.float32, E4M3_DTYPE, {"fp8_dtype": "e5m2"}, (FP32, E4M3, FP32)),
    ],
)
def test_types_are_described(q, kv, names, expected):
    args = paged()
    args.update(q=args["q"].astype(q), k=args["k"].astype(kv), v=args["v"].astype(kv), **names)
    p = describe_call(**args).problem
    assert (p.q_type, p.kv_type, p.out_type) == expected


def test_an_8_bit_query_takes_the_type_of_out():
    args = paged()
    args.update({n: args[n].astype(np.uint8) for n in "qkv"})
    assert describe_call(**args, out=np.zeros((4, 6, 64), np.float16)).problem.out_type is FP16


@pytest.mark.parametrize("scale", [2.0, 2, np.float32(2), np.float64(2), np.array(2.0)])
def test_every_number_is_the_same_scale(scale):
    assert problem_of(softmax_scale=scale) is problem_of(softmax_scale=2.0)


def test_equal_calls_share_one_problem():
    assert problem_of() is problem_of()
    assert problem_of(max_seqlen_k=np.int64(20)) is problem_of(max_seqlen_k=20)
    assert problem_of() is not problem_of(causal=True)


def test_a_call_that_was_refused_is_refused_again():
    for _ in range(2):
        with pytest.raises(TypeError, match=r"max_seqlen_q is float"):
            problem_of(max_seqlen_q=3.0)
        problem_of(max_seqlen_q=3)


def test_descales_may_be_numbers_arrays_or_absent():
    args = paged()
    args.update(k=args["k"].astype(np.uint8), v=args["v"].astype(np.uint8))
    whole = np.ones((2, 2), np.float32)
    for k_descale in (0.5, np.float32(0.5), np.array(0.5), whole[:1, :1].reshape(1), whole,
                      np.broadcast_to(whole[:1, :1], (2, 2))):  # fmt: skip
        call = describe_call(**args, k_descale=k_descale)
        assert call.problem.has_kv_descale
        assert call.descales[0] is None
        assert isinstance(call.descales[1], float if np.ndim(k_descale) == 0 else np.ndarray)


# Arrays


class FakeArray:
    """As much of a CuPy array as describing a call touches."""

    def __init__(self, array, ordinal=0):
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides
        self._c_contiguous = bool(array.flags.c_contiguous)
        self.data = SimpleNamespace(device_id=ordinal)


FakeArray.__module__ = "cupy"


def test_numpy_arrays_are_computed_on_the_host_and_others_are_not():
    a = np.zeros(3)
    assert place(("a", "b"), (a, None))[1]
    assert not place(("a", "b"), (FakeArray(a), None))[1]


def test_arrays_of_both_sides_are_refused():
    a = np.zeros(3)
    with pytest.raises(TypeError, match=r"NumPy arrays \(a\) and GPU arrays \(b\)"):
        place(("a", "b", "c"), (a, FakeArray(a), None))


def test_arrays_of_two_gpus_are_refused():
    a = np.zeros(3)
    with pytest.raises(ValueError, match=r"a on 0, b on 1; use one GPU"):
        place(("a", "b"), (FakeArray(a), FakeArray(a, 1)))


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match="q is list; pass a NumPy or CuPy array"):
        as_array([1, 2], "q")


def test_subclasses_and_dlpack_of_numpy_are_numpy(tmp_path):
    saved = tmp_path / "a.npy"
    np.save(saved, np.arange(3))
    mapped = np.load(saved, mmap_mode="r")
    assert type(as_array(mapped, "a")) is np.ndarray
    source = np.arange(4)

    class Foreign:
        __dlpack__ = staticmethod(source.__dlpack__)
        __dlpack_device__ = staticmethod(source.__dlpack_device__)

    assert np.shares_memory(as_array(Foreign(), "a"), source)


def test_a_device_that_is_neither_cpu_nor_cuda_is_named():
    foreign = SimpleNamespace(__dlpack_device__=lambda: (10, 0))
    with pytest.raises(TypeError, match="k is on DLPack device type 10"):
        as_array(foreign, "k")


@pytest.mark.parametrize(
    ("array", "unit", "overlaps"),
    [
        (np.zeros((3, 4)), True, False),
        (np.zeros((3, 8))[:, ::2], False, False),
        (np.zeros((3, 4)).T, False, False),
        (np.zeros((3, 8))[:, ::8], True, False),
        (np.zeros((0, 8))[:, ::2], True, False),
        (np.broadcast_to(np.zeros(4), (3, 4)), True, True),
        (np.broadcast_to(np.zeros(4), (0, 4)), True, False),
        (np.zeros(()), True, False),
    ],
)
def test_strides_that_matter(array, unit, overlaps):
    spec = ArraySpec(array.shape, array.dtype, array.strides)
    assert (spec.unit_stride, spec.overlaps) == (unit, overlaps)


def test_leading_dimensions_merge_without_a_copy_or_not_at_all():
    a = np.zeros((2, 3, 4))
    assert np.shares_memory(merge_leading(a, "a"), a)
    with pytest.raises(ValueError, match="a with shape"):
        merge_leading(a[:, :2], "a")
    assert merge_leading(a[:, :2], "a", copy=True).shape == (4, 4)


# Host time


def warm_call(batch):
    """Describes a decode call of arrays that cost no more to ask than CuPy's do."""
    q, k = np.zeros((batch, 32, 128), np.float16), np.zeros((64, 16, 8, 128), np.float16)
    host = AttentionArrays(
        q, k, k, np.zeros(batch + 1, np.int32), seqused_k=np.zeros(batch, np.int32),
        block_table=np.zeros((batch, 4), np.int32), out=q,
    )  # fmt: skip
    arrays = AttentionArrays(*(None if a is None else FakeArray(a) for a in host))
    numbers = (1, 64, 0.1, True, (-1, -1), 0.0, "e4m3", None, False, 0, False)
    return lambda: prepare(arrays, (None, None, None), *numbers)


def hundred_calls(function=lambda: None):
    for _ in range(100):
        function()


def test_describing_a_warm_call_is_quick_and_flat_in_the_batch():
    """3.6 µs, or 150 calls of an empty function; the two are measured in turn."""
    timed = {"unit": hundred_calls, "small": warm_call(1), "large": warm_call(4096)}
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(30):
        for name, function in timed.items():
            best[name] = min(best[name], timeit.timeit(function, number=200))
    assert best["small"] < 2.5 * best["unit"]
    assert best["large"] < 1.5 * best["small"]
