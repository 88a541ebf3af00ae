"""Arrays of other libraries on a GPU: DLPack alone, the array interface alone."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, random_batch, run
from foreign_arrays import Foreign

import cupyflash as cf

BF16 = np.dtype(ml_dtypes.bfloat16)


pytestmark = pytest.mark.gpu


class Interface:
    """A GPU array of which nothing is known but the array interface."""

    def __init__(self, array, stream=None):
        self.array, self.stream = array, stream

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__cuda_array_interface__, "stream": self.stream}


@pytest.fixture
def no_garbage():
    """Nothing is collected in a test: a module of an earlier one, unloaded, waits for the GPU."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("kind", [Foreign, Interface])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_producer_on_another_stream_is_waited_for_on_the_device(kind, explicit):
    import cupy as cp
    from conftest import Path

    path = Path("gpu")
    batch = random_batch([1], [3000], 4, 2)
    args = arguments(path, *batch, [1], [3000], 16, num_splits=1, fa_version=2)
    right = run(path, args)[0]
    hold = cp.RawKernel(
        'extern "C" __global__ void hold(const volatile int *open) { long long t = clock64(); '
        "while (!*open && clock64() - t < 40000000000) {} }",
        "hold",
    )
    flag = cp.cuda.alloc_pinned_memory(4)  # the GPU reads it while it waits, at most 20 s
    gate = np.frombuffer(flag, np.int32, 1)
    gate[0] = 0
    producer, consumer = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    rehearsed, late = (cp.full_like(args["q"], np.nan) for _ in range(2))
    out = cp.empty_like(args["q"])
    for stream in (None, consumer):  # nothing is allocated later, which could wait
        cf.flash_attn_varlen_func(**{**args, "out": out}, stream=stream)
    cp.cuda.Device().synchronize()

    def produce_and_attend(q):
        """An event behind what is produced."""
        with producer:
            hold((1,), (1,), (np.uint64(flag.ptr),))
            q[...] = args["q"]
            done = producer.record()
            given = {**args, "out": out, "q": kind(q)}
            if kind is Foreign:  # CuPy exports on its current stream
                cf.flash_attn_varlen_func(**given, stream=consumer)
                return done
        given["q"] = Interface(q, producer.ptr)
        if explicit:
            cf.flash_attn_varlen_func(**given, stream=consumer)
        else:
            with consumer:
                cf.flash_attn_varlen_func(**given)
        return done

    gate[0] = 1  # first with the gate open: loading a kernel may wait for one that holds the GPU
    produce_and_attend(rehearsed)
    cp.cuda.Device().synchronize()
    gate[0] = 0
    out.fill(np.nan)
    cp.cuda.Device().synchronize()
    waited = produce_and_attend(late).done
    gate[0] = 1
    assert not waited  # the host has not
    consumer.synchronize()
    np.testing.assert_array_equal(out.get().astype(float), right)


@pytest.mark.parametrize("kind", [Foreign, Interface])
def test_results_of_foreign_gpu_arrays(kind):
    import cupy as cp
    from conftest import Path

    path = Path("gpu")
    dtype = np.float16 if kind is Interface else BF16  # the interface has no name for bfloat16
    args = arguments(path, *random_batch([2, 1], [30, 500], 4, 2, dtype=dtype), [2, 1], [30, 500])
    right = run(path, args)[0]
    out = cp.full_like(args["q"], np.nan)
    foreign_args = {n: kind(a) if hasattr(a, "dtype") else a for n, a in args.items()}
    given = kind(out)
    assert cf.flash_attn_varlen_func(**foreign_args, out=given) is given
    np.testing.assert_array_equal(out.get().astype(float), right)
    empty = kind(cp.empty((0, 4, 64), dtype))
    foreign_args.update(q=empty, cu_seqlens_q=kind(cp.zeros(3, np.int32)))
    assert cf.flash_attn_varlen_func(**foreign_args).shape == (0, 4, 64)
