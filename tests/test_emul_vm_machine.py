"""The machine: counters, order, messages, limits."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError, device_array, emulated
from emulator.mutants import doubled, split_sum
from emulator.tensor_map import encode_tiled
from emulator.toys import attend, pointer

from cupyflash.runtime.device import active_device

HEAD = 'extern "C" __global__ void k'


def run(source, arrays, grid=1, block=32, smem=0, extra=(), arch="sm_80", **options):
    device = EmulatedDevice(arch)
    program = device.compile_source(source, ["-default-device"]).program("k")
    args = [*(pointer(a) for a in arrays), *extra]
    return device.run(program, (grid,), (block,), smem, args, arrays, **options)


# ---- counters
def test_causal_attention_skips_tiles():
    device = EmulatedDevice("sm_80")
    full = attend(device, "fa2.cu", 200, 1, False)[1].mma_count
    causal = attend(device, "fa2.cu", 200, 1, True)[1].mma_count
    assert (full, causal) == (16 * 4 * 64, 10 * 4 * 64)  # tiles, warps, mma a tile


def test_swizzled_tiles_have_no_bank_conflicts_and_others_have():
    device = EmulatedDevice("sm_80")
    assert attend(device, "fa2.cu", 100, 1, False)[1].bank_conflicts == 0
    report = attend(device, "fa2.cu", 64, 1, False, defines=("NO_SWIZZLE=1",))[1]
    loads = report.count("ldmatrix")
    at_loads = sum(n for where, n in report.conflicts.items() if "ldmatrix" in where)
    assert at_loads == 28 * loads


def test_each_pool_byte_is_read_once():
    data = device_array(4096, np.float32, 1.0)
    out = device_array(4, np.float32)
    source = (
        HEAD
        + "(const float4* x, float* o) { float s = 0; for (int i = threadIdx.x; i < 256; i += 32) {\n"
    )
    source += "  float4 v = x[blockIdx.x * 256 + i]; s += v.x + v.y + v.z + v.w; }\n"
    source += "  for (int m = 16; m; m /= 2) s += __shfl_xor_sync(~0u, s, m); if (threadIdx.x == 0) o[blockIdx.x] = s; }"
    report = run(source, [data, out], grid=4)
    assert out.tolist() == [1024.0] * 4
    assert report.bytes_read == [data.nbytes, 0]
    assert report.bytes_written == [0, out.nbytes]
    assert report.count("shfl") == 4 * 5


# ---- order
def test_a_seed_repeats_and_seeds_differ():
    device = EmulatedDevice("sm_80")
    reports = [attend(device, "fa2.cu", 130, 1, True, seed)[1] for seed in (1, 1, 2)]
    switches = [r.stats["switches"] for r in reports]
    assert switches[0] == switches[1]
    assert switches[0] != switches[2]


def test_results_do_not_depend_on_the_order():
    for seed in range(10):
        assert split_sum(seed) == 0
        assert doubled(seed) == 0


def test_ctas_run_at_once():
    """Each CTA waits for the other: a machine that runs one after the other hangs here."""
    flags = device_array(2, np.uint32, 0)
    source = (
        HEAD
        + "(volatile unsigned* f) { if (threadIdx.x == 0) { f[blockIdx.x] = 1; while (!f[1 - blockIdx.x]); } }"
    )
    for seed in range(4):
        flags[...] = 0
        run(source, [flags], grid=2, seed=seed)
        assert flags.tolist() == [1, 1]


def test_atomics_of_all_ctas_are_counted():
    counts = device_array(5, np.uint32, 0)
    source = (
        HEAD + "(unsigned* c) { atomicAdd(c + (blockIdx.x * blockDim.x + threadIdx.x) % 5, 1u); }"
    )
    run(source, [counts], grid=7, block=64, seed=3)
    assert counts.sum() == 7 * 64


# ---- messages
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (threadIdx.x & 16) __syncthreads(); else { o[1] = 0; __syncthreads(); o[2] = 1; }",
            r"DIVERGENT|RACE",
        ),
        (
            "if (threadIdx.x < 16) o[threadIdx.x] = __reduce_add_sync(~0u, 1);",
            r"DIVERGENT[\s\S]*exited[\s\S]*kernel.cu:2",
        ),
        ("__trap();", r"TRAP[\s\S]*kernel.cu:2"),
        (
            "o[0] = threadIdx.x + ((volatile int*)o)[64];",
            r"OUT OF BOUNDS.*arrays\[0\] \(int32\[64\]\)",
        ),
        ("*(volatile int*)((char*)o + 2) = 1;", "MISALIGNED"),
        (
            "extern __shared__ int s[]; s[threadIdx.x + 8] = 1; o[0] = s[9];",
            "OUT OF BOUNDS.*shared",
        ),
        ("if (threadIdx.x == 40) while (((volatile int*)o)[1] == 0);", "NO PROGRESS[^@]*kernel.cu"),
        ('if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); ', "DEADLOCK.*[^@]*barrier 1"),
        ("o[blockIdx.x ? 0 : threadIdx.x] = 1;", "RACE: write not ordered after a write"),
        (
            "if (threadIdx.x < 31) o[threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 31);",
            "DIVERGENT|MASK|SHFL",
        ),
    ],
)
def test_messages_name_the_fault_and_the_line(body, message):
    out = device_array(64, np.int32, 0)
    with pytest.raises(EmulatorError, match=message):
        run(f"{HEAD}(int* o) {{\n{body}\n}}", [out], grid=2, block=64, smem=128, max_idle=20000)


def test_writes_to_read_only_arrays_are_refused():
    data = device_array(32, np.int32, 0)
    data.flags.writeable = False
    with pytest.raises(EmulatorError, match="READ-ONLY"):
        run(HEAD + "(int* o) { o[threadIdx.x] = 1; }", [data])


def test_memory_that_is_not_registered_is_refused():
    data = device_array(32, np.int32, 0)
    source = HEAD + "(int* o) { o[threadIdx.x] = 1; }"
    device = EmulatedDevice("sm_80")
    program = device.compile_source(source).program("k")
    with pytest.raises(EmulatorError, match="no array is registered"):
        device.run(program, (1,), (32,), 0, [pointer(data)], [])


def test_shared_memory_limit_of_the_device():
    data = device_array(32, np.int32, 0)
    with pytest.raises(EmulatorError, match="the limit is 166912"):
        run(HEAD + "(int* o) { o[0] = 1; }", [data], smem=166912 + 16)


def test_release_and_acquire_order_two_ctas():
    data, flag = device_array(32, np.int32, 0), device_array(1, np.uint32, 0)
    out = device_array(32, np.int32, 0)
    source = """__device__ inline void put(unsigned* p) { asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(p) : "memory"); }
__device__ inline unsigned get(unsigned* p) { unsigned v; asm volatile("ld.ACQUIRE.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
extern "C" __global__ void k(int* d, unsigned* f, int* o) {
  if (blockIdx.x == 0) { d[threadIdx.x] = threadIdx.x; __syncthreads(); if (threadIdx.x == 0) put(f); }
  else { if (threadIdx.x == 0) while (!get(f)); __syncthreads(); o[threadIdx.x] = d[threadIdx.x]; }
}"""
    for seed in range(6):
        flag[...] = 0
        run(source.replace("ACQUIRE", "acquire"), [data, flag, out], grid=2, seed=seed)
        assert out.tolist() == list(range(32))
        flag[...] = 0
        with pytest.raises(EmulatorError, match="RACE: read not ordered after a write"):
            run(source.replace("ACQUIRE", "relaxed"), [data, flag, out], grid=2, seed=seed)


# ---- tensor maps and the seam
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pointer": 8}, "multiple of 16"),
        ({"strides_bytes": (24,)}, "stride 24"),
        ({"box": (257, 4)}, "box"),
        ({"box": (4, 4)}, "inner box of 8 bytes"),
        ({"swizzle": 1, "box": (32, 4)}, "swizzle of 32 bytes"),
        ({"shape": (0, 4)}, "shape"),
        ({"oob_fill": 1, "element_type": 1}, "NaN fill"),
        ({"shape": (64, 4, 1, 1, 1, 1), "strides_bytes": (128,) * 5, "box": (8,) * 6}, "rank 6"),
    ],
)
def test_tensor_map_follows_the_rules_of_the_driver(changes, message):
    good = {"element_type": 9, "pointer": 256, "shape": (64, 4), "strides_bytes": (128,)}
    good |= {"box": (64, 4), "swizzle": 0, "oob_fill": 0}
    assert encode_tiled(**good).nbytes == 128
    with pytest.raises(ValueError, match=message):
        encode_tiled(**{**good, **changes})


def test_emulated_is_the_active_device():
    assert active_device() is None
    with emulated("sm_90a", num_sms=3) as device:
        assert active_device() is device
        assert device.info.capability == (9, 0)
        assert device.info.num_sms == 3
        array = device.empty((3, 5), np.float32)
        assert np.isnan(array).all()
        assert device.pointer(array) % 256 == 0
    assert active_device() is None


def test_speed_with_the_checker_on():
    """A floor that only a broken build misses; docs/emulator.md has the figures."""
    device = EmulatedDevice("sm_80")
    reports = [attend(device, "fa2.cu", 200, 2, False)[1] for _ in range(5)]
    assert max(r.steps / r.seconds for r in reports) > 5e5
    assert re.fullmatch(r"fa2_fwd", reports[0].symbol)


def test_barriers_and_collectives_wait_for_those_that_have_not_exited():
    out = device_array(128, np.int32, -1)
    source = (
        HEAD
        + """(int* o) {
  __shared__ int x[128];
  const int t = threadIdx.x;
  if (t >= 96 || (t & 31) >= 20) return;
  x[t] = t;
  __syncthreads();
  o[t] = x[(t + 32) % 96] + __reduce_max_sync(0xfffff, t);
}"""
    )
    for seed in range(6):
        out[...] = -1
        run(source, [out], block=128, seed=seed)
        for t in range(128):
            alive = t < 96 and t % 32 < 20
            assert out[t] == ((t + 32) % 96 + t // 32 * 32 + 19 if alive else -1)
