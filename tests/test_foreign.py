"""Arrays of other libraries: DLPack and the array interface, by stand-ins and on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from foreign_arrays import Foreign

import cupyflash as cf
from cupyflash.runtime.foreign import Consumer, adopt, is_array

BF16 = np.dtype(ml_dtypes.bfloat16)


def wrapped(value):
    return Foreign(value) if hasattr(value, "dtype") else value


Q = np.random.default_rng(0).standard_normal((5, 4, 64)).astype(np.float16)
K = np.random.default_rng(1).standard_normal((9, 2, 64)).astype(np.float16)
CACHE = np.random.default_rng(2).standard_normal((4, 16, 2, 64)).astype(np.float16)
LSE = np.zeros((4, 5), np.float32)


def ints(*values):
    return np.array(values, np.int32)


def calls(of):
    """Every public function that takes arrays, on ``of`` them; name, result, what is written."""
    out, lse = np.zeros_like(Q), np.zeros_like(LSE)
    given = of(out), of(lse)
    found = cf.flash_attn_varlen_func(
        of(Q), of(K), of(K), 5, of(ints(0, 5)), 9, of(ints(0, 9)), out=given[0], lse=given[1],
        return_softmax_lse=True, s_aux=of(np.ones(4, np.float32)),
        alibi_slopes=of(np.ones(4, np.float32)),
    )  # fmt: skip
    yield "flash_attn_varlen_func", found, given, (out, lse)
    out, lse = np.zeros_like(Q[None]), np.zeros_like(LSE[None])
    given = of(out), of(lse)
    found = cf.flash_attn_func(
        of(Q[None]), of(K[None]), of(K[None]), out=given[0], lse=given[1], return_softmax_lse=True
    )
    yield "flash_attn_func", found, given, (out, lse)
    caches = CACHE.copy(), CACHE.copy()
    out = np.zeros_like(Q[None])
    given = of(out)
    found = cf.flash_attn_with_kvcache(
        of(Q[None]), *map(of, caches), of(K[None, :5]), of(K[None, :5]), out=given,
        cache_seqlens=of(ints(3)), block_table=of(ints(1, 2)[None]), causal=True,
    )  # fmt: skip
    yield "flash_attn_with_kvcache", found, given, (out, *caches)
    caches = np.zeros(CACHE.shape, np.uint8), np.zeros(CACHE.shape, np.uint8)
    cf.reshape_and_cache_flash(
        of(K), of(K), *map(of, caches), of(np.arange(9)), "fp8", of(np.ones(1, np.float32)), 1.0
    )
    yield "reshape_and_cache_flash", None, None, caches
    out, lse = np.zeros_like(Q), np.zeros_like(LSE)
    cf.merge_attn_states(of(out), of(Q), of(LSE), of(Q * 2), of(LSE), of(lse))
    yield "merge_attn_states", None, None, (out, lse)
    out = np.zeros_like(Q)
    given = of(out)
    found = cf.cascade_attention(
        given, of(Q), of(CACHE), of(CACHE), of(ints(0, 5)), 5, of(ints(0, 5)), of(ints(16)),
        of(ints(5)), 21, 0.1, None, (-1, -1), 0.0, of(ints(0, 1)[None]), 16, 0, None,
    )  # fmt: skip
    yield "cascade_attention", found, given, (out,)
    fp8 = CACHE.view(np.uint8)[..., :64].copy()
    out = np.zeros_like(Q)
    schedule = cf.get_scheduler_metadata(
        1, 5, 20, 4, 2, 64, of(ints(20)), "e4m3", cu_seqlens_q=of(ints(0, 5)), page_size=16,
        out=of(np.zeros(8, np.int32)),
    )  # fmt: skip
    given = of(out)
    found = cf.flash_attn_varlen_func(
        of(Q), of(fp8), of(fp8), 5, of(ints(0, 5)), 20, seqused_k=of(ints(20)), out=given,
        block_table=of(ints(1, 3)[None]), k_descale=of(np.ones((1, 2), np.float32)),
        scheduler_metadata=schedule, v_descale=of(np.full(1, 0.5, np.float32)),
    )  # fmt: skip
    yield "descales and a schedule", found, given, (out,)


def test_every_function_takes_them_and_returns_what_it_was_given():
    for (name, found, given, written), (_, _, _, right) in zip(
        calls(wrapped), calls(lambda array: array), strict=True
    ):
        for left, expected in zip(written, right, strict=True):
            assert left.any(), name
            assert left.tobytes() == expected.tobytes(), name
        if given is not None:
            pairs = zip(found, given, strict=True) if isinstance(given, tuple) else [(found, given)]
            assert all(a is b for a, b in pairs), name


def test_bfloat16_of_a_library_that_numpy_cannot_read_by_dlpack():
    """As JAX on the CPU hands it out: an array of ml_dtypes, without a copy."""

    class Jax(Foreign):
        def __dlpack__(self, **options):
            raise BufferError("unsupported dtype")

        def __array__(self, dtype=None, copy=None):
            assert copy is False
            return self.array

    array = np.ones((2, 3), BF16)
    assert adopt(Jax(array), "q", Consumer()) is array


def test_what_cannot_be_exchanged_says_how_else():
    class Torch(Foreign):
        dtype = "torch.bfloat16"

        def __dlpack__(self, **options):
            raise BufferError("Unsupported dtype in DLTensor")

        def __array__(self, dtype=None, copy=None):
            raise TypeError("Got unsupported ScalarType BFloat16")

    for words in ("q", "torch.bfloat16", "uint16", "fp8_dtype"):
        with pytest.raises(TypeError, match=words):
            adopt(Torch(np.ones(2, np.float16)), "q", Consumer())


def test_other_devices_are_refused():
    class Rocm(Foreign):
        def __dlpack_device__(self):
            return 10, 0

    with pytest.raises(TypeError, match="q is on DLPack device type 10; use a CUDA or a CPU array"):
        adopt(Rocm(np.ones(2)), "q", Consumer())
    with pytest.raises(TypeError, match="q is list"):
        adopt([1.0], "q", Consumer())


def test_what_is_an_array():
    interface = SimpleNamespace(__cuda_array_interface__={})
    for value in (np.ones(2), np.array(1.0), Foreign(np.ones(2)), interface):
        assert is_array(value)
    for value in (1.0, np.float32(1), None, [1.0], "x"):
        assert not is_array(value)


def test_an_array_in_parts_is_refused():
    class Array(Foreign):
        def __dlpack_device__(self):
            raise BufferError("__dlpack__ only supported for unsharded arrays.")

    with pytest.raises(TypeError, match=r"q \(Array, .*unsharded"):
        adopt(Array(np.zeros(2, np.float16)), "q", Consumer())


def test_host_memory_that_is_read_only_is_read_and_not_written():
    array = np.zeros(2, np.float16)
    array.flags.writeable = False
    adopt(Foreign(array), "q", Consumer())
    with pytest.raises(ValueError, match=r"out is written.*read-only"):
        adopt(Foreign(array), "out", Consumer())


def test_an_array_that_was_donated_is_refused():
    class Array(Foreign):
        def is_deleted(self):
            return True

    with pytest.raises(ValueError, match="q was deleted or donated"):
        adopt(Array(np.zeros(2, np.float16)), "q", Consumer())


def test_arrays_of_jax_are_read_only_in_types_without_an_interface():
    class Array(Foreign):
        __module__ = "jaxlib._jax"

        def __dlpack_device__(self):
            return 2, 0

        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("not supported for BF16 buffers")

    for name in ("out", "key_cache", "workspace"):
        with pytest.raises(ValueError, match=f"{name} is written, and jaxlib hands it out as read"):
            adopt(Array(np.zeros(2, np.float16)), name, Consumer())


def test_a_foreign_workspace_is_used_and_checked():
    pytest.importorskip("cupy")  # its NVRTC
    from emulator import emulated

    with emulated("sm_80"):
        args = {
            "q": Q[:1], "k": np.tile(K, (40, 1, 1)), "v": np.tile(K, (40, 1, 1)),
            "max_seqlen_q": 1, "cu_seqlens_q": ints(0, 1), "max_seqlen_k": 360,
            "cu_seqlens_k": ints(0, 360), "num_splits": 4,
        }  # fmt: skip
        right = cf.flash_attn_varlen_func(**args)
        memory = np.zeros(1 << 16, np.uint8)
        found = cf.flash_attn_varlen_func(**args, workspace=Foreign(memory))
        assert found.tobytes() == right.tobytes()
        with pytest.raises(TypeError, match="workspace is list"):
            cf.flash_attn_varlen_func(**args, workspace=[0])
