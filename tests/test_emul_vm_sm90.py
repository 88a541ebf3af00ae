"""The machine runs the sm_90a instruction class right."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError, device_array
from emulator.tensor_map import encode_tiled
from emulator.toys import attend


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 17, 64, 100, 200])
def test_attention_with_tma_mbarrier_and_wgmma(n, causal):
    device = EmulatedDevice("sm_90a")
    for seed in range(4):
        error, report = attend(device, "fa3.cu", n, 2, causal, seed)
        assert error < 0.0101
        assert report.count("wgmma.mma_async") == report.mma_count


COPY = """
struct alignas(64) TensorMap { unsigned long long opaque[16]; };
__device__ inline unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const __grid_constant__ TensorMap from,
                             const __grid_constant__ TensorMap to, int x, int y) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const unsigned box = at(smem), bar = box + 4096;
  if (threadIdx.x) return;
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;"
               :: "r"(bar) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" :: "r"(bar) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(box), "l"(&from), "r"(bar), "r"(x), "r"(y) : "memory");
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0;"
               " @P bra D; bra L; D: }" :: "r"(bar) : "memory");
  asm volatile("OP.async.bulk.tensor.2d.global.shared::cta.TAILbulk_group [%0, {%2, %3}], [%1];"
               :: "l"(&to), "r"(box), "r"(0), "r"(8) : "memory");
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_tensor_load_then_store_moves_a_box(swizzle, reduce):
    inner = {0: 32, 1: 8, 2: 16, 3: 32}[swizzle]
    rows = 1024 // inner
    data = device_array((rows + 20, 64), np.float32)
    data[...] = np.arange(data.size).reshape(data.shape)
    out = device_array((rows + 5, 64), np.float32, 100.0)
    text = COPY.replace("OP", "cp.reduce" if reduce else "cp").replace(
        "TAIL", "add." if reduce else ""
    )
    device = EmulatedDevice("sm_90a")
    program = device.compile_source(text, ["-default-device"]).program("k")
    x, y = 64 - inner // 2, rows // 2 + 18  # half of the columns and some rows are outside: zeros
    maps = [
        encode_tiled(7, a.ctypes.data, a.shape[::-1], (256,), (inner, rows), swizzle=swizzle)
        for a in (data, out)
    ]
    for seed in range(3):
        out[...] = 100.0
        args = [*maps, np.int32(x), np.int32(y)]
        device.run(program, (1,), (32,), 4096 + 64, args, [data, out], seed=seed)
        box = np.zeros((rows, inner), np.float32)
        inside = data[y : y + rows, x : x + inner]
        box[: inside.shape[0], : inside.shape[1]] = inside
        expected = np.full_like(out, 100.0)
        target = expected[8:, :inner]  # rows past the end of the array are dropped
        target[...] = target * reduce + box[: target.shape[0]]
        np.testing.assert_array_equal(out, expected)


APART = """
__device__ inline unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ inline void wait(unsigned bar) {
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0;"
               " @P bra D; bra L; D: }" :: "r"(bar) : "memory");
}
extern "C" __global__ void k(const unsigned* from, unsigned* to) {
  __shared__ __align__(16) unsigned data[32];
  __shared__ unsigned long long bar;
  const int lane = threadIdx.x;
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;"
                 :: "r"(at(&bar)) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" :: "r"(at(&bar)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                 :: "r"(at(data)), "l"(from), "r"(at(&bar)) : "memory");
  }
  __syncwarp();
  if (lane < 13) { wait(at(&bar)); to[32 + lane] = 1; } else if (!SOME) { wait(at(&bar)); to[32 + lane] = 2; }
  unsigned x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(at(data + lane % 8 * 4)) : "memory");
  to[lane] = x;
}
"""


@pytest.mark.parametrize("some", [0, 1])
def test_lanes_that_wait_one_after_the_other_have_all_waited(some):
    data, out = device_array(32, np.uint32, np.arange(32)), device_array(64, np.uint32)
    device = EmulatedDevice("sm_90a")
    program = device.compile_source(APART, ["-default-device", f"-DSOME={some}"]).program("k")
    args = [np.uint64(a.ctypes.data) for a in (data, out)]
    for seed in range(8):
        if some:
            with pytest.raises(EmulatorError, match="RACE"):
                device.run(program, (1,), (32,), 0, args, [data, out], seed=seed)
            continue
        device.run(program, (1,), (32,), 0, args, [data, out], seed=seed)
        np.testing.assert_array_equal(out[:32], data)
