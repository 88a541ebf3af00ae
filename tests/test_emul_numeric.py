"""core/numeric.cuh on the emulator: conversions by arithmetic (8.0) and by instruction (9.0)."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatedDevice, device_array

from cupyflash.runtime.dtypes import BF16, E4M3, E5M2, FP16, FP32
from cupyflash.runtime.kernel_source import kernel_root, kernel_source
from cupyflash.runtime.variant import Variant
from cupyflash.testing import saturate

TYPES = {t.name: t for t in (FP32, FP16, BF16, E4M3, E5M2)}
COUNT = 1 << 14  # values a launch

KERNEL = """
#include "core/variant.cuh"
#include "core/numeric.cuh"
#include "core/memory.cuh"

struct Params {
  const char *in;
  char *out;
};

// Two elements a thread.
extern "C" __global__ void KERNEL_NAME(const __grid_constant__ Params p) {
  constexpr ScalarType kIn = static_cast<ScalarType>(FROM), kOut = static_cast<ScalarType>(TO);
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  Elements<kIn, 2> in;
  Elements<kOut, 2> out;
  in.load(p.in + i * kItemBytes<kIn>);
  float value[2];
  in.to_floats(value);
  out.from_floats(value);
  out.store(p.out + i * kItemBytes<kOut>);
}
"""


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def convert(request, tmp_path_factory):
    """A function that converts values from one type to another in a kernel."""
    root = tmp_path_factory.mktemp("kernels")
    shutil.copytree(kernel_root() / "core", root / "core")
    (root / "convert.cu").write_text(KERNEL)
    device = EmulatedDevice(request.param)

    def run(values, source, target):
        defines = (("FROM", source.code), ("TO", target.code))
        variant = Variant("convert.cu", "convert", request.param, defines)
        program = device.compile_source(*kernel_source(variant, root), "convert.cu")
        given = np.ascontiguousarray(values, source.numpy)
        found = np.empty(len(given), target.numpy)
        for start in range(0, len(given), COUNT):
            part = given[start : start + COUNT]
            read, written = device_array(COUNT, source.numpy), device_array(COUNT, target.numpy)
            read[: len(part)] = part
            packed = np.array([read.ctypes.data, written.ctypes.data], np.uint64)
            device.run(
                program.program("convert"), (COUNT // 512,), (256,), 0, (packed,), (read, written)
            )
            found[start : start + COUNT] = written[: len(part)]
        return found

    return run


def all_values(kind):
    unsigned = {1: np.uint8, 2: np.uint16}[kind.itemsize]
    return np.arange(1 << 8 * kind.itemsize).astype(unsigned).view(kind.numpy)


@np.errstate(invalid="ignore")  # signalling NaN
def floats():
    """Ties, their neighbours and the edges of every format, subnormals, infinities, NaN."""
    rng = np.random.default_rng(0)
    found = [np.array([np.nan, np.inf, 0.0, 448, 464, 465, 480, 57344, 61440, 65504, 65520, 1e38])]
    for kind in (FP16, BF16, E4M3, E5M2):
        exact = all_values(kind).astype(np.float64)
        exact = np.unique(exact[np.isfinite(exact)])
        ties = (exact[1:] + exact[:-1])[:: 1 if kind.is_fp8 else 64] / 2
        ties = ties.astype(np.float32)
        found += [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(0))]
    found.append(rng.integers(0, 1 << 32, 4096, np.uint32).view(np.float32))
    everything = np.concatenate([part.astype(np.float32) for part in found])
    return np.concatenate([everything, -everything])


def same_bits_but_nan(found, expected):
    assert (np.isnan(found) == np.isnan(expected)).all()
    real = ~np.isnan(expected)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[found.itemsize]
    np.testing.assert_array_equal(found[real].view(unsigned), expected[real].view(unsigned))


@pytest.mark.parametrize("target", ["fp32", "fp16", "bf16", "e4m3", "e5m2"])
def test_from_float32(convert, target):
    values, kind = floats(), TYPES[target]
    with np.errstate(all="ignore"):
        expected = saturate(values, kind.numpy) if kind.is_fp8 else values.astype(kind.numpy)
    same_bits_but_nan(convert(values, FP32, kind), expected)


@pytest.mark.parametrize("source", ["fp16", "bf16", "e4m3", "e5m2"])
def test_every_value_to_float32(convert, source):
    values = all_values(TYPES[source])
    with np.errstate(invalid="ignore"):
        expected = values.astype(np.float32)
    same_bits_but_nan(convert(values, TYPES[source], FP32), expected)


@pytest.mark.parametrize("source", ["fp16", "bf16"])
@pytest.mark.parametrize("target", ["e4m3", "e5m2"])
def test_every_16_bit_value_to_8_bits(convert, source, target):
    values, kind = all_values(TYPES[source]), TYPES[target]
    found = convert(values, TYPES[source], kind)
    with np.errstate(invalid="ignore"):
        expected = saturate(values.astype(np.float32), kind.numpy)
    same_bits_but_nan(found, expected)
    largest = float(ml_dtypes.finfo(kind.numpy).max)
    assert found[values == np.inf].astype(float) == largest


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_8_bits_survive_the_way_there_and_back(convert, kind):
    values = all_values(TYPES[kind])
    finite = values[np.isfinite(values.astype(np.float32))]
    same_bits_but_nan(convert(finite, TYPES[kind], TYPES[kind]), finite)
