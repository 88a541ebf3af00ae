"""The machine runs the sm_80 instruction class right."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError, device_array
from emulator.toys import attend, pointer


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 17, 64, 100, 200])
def test_attention_with_cp_async_and_mma(n, causal):
    device = EmulatedDevice("sm_80")
    for seed in range(3):
        error, report = attend(device, "fa2.cu", n, 2, causal, seed)
        assert error < 0.0101  # P and the output are rounded to bf16
        assert report.bank_conflicts == 0
        assert report.stats["uninitialised"] == 0


def run(source, args, arrays, grid=(1,), block=(32,), smem=0, arch="sm_80", seed=0, name="k"):
    device = EmulatedDevice(arch)
    program = device.compile_source(source, ["-default-device"]).program(name)
    return device.run(program, grid, block, smem, args, arrays, seed=seed)


def test_out_of_bounds_names_array_and_line():
    out = device_array(31, np.float32)
    source = 'extern "C" __global__ void k(float* o) {\n  o[threadIdx.x] = 1.f;\n}'
    with pytest.raises(EmulatorError, match=r"arrays\[0\].*4 bytes past its end[\s\S]*kernel.cu:2"):
        run(source, [pointer(out)], [out])
    assert np.all(out[:31] == 1)
