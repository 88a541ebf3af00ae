"""cp.async, bulk and tensor copies, mbarriers."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np

try:
    from .conformance import Case, MapSpec, hashed
except ImportError:
    from conformance import Case, MapSpec, hashed

WAIT = """
__device__ inline void start(u32 bar, u32 bytes) {
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
  }
  __syncthreads();
}
__device__ inline void wait(u32 bar) {
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0; @P bra D; bra L; D: }"
               :: "r"(bar) : "memory");
}
"""


def load_case(name, spec, nbytes, coords, data):
    """One tensor load into 0xA5 bytes; all of shared memory is the result."""
    rank = len(spec.shape)
    registers = ",".join(f"%{3 + i}" for i in range(rank))
    inputs = ", ".join(f'"r"({c})' for c in coords)
    room = -(-nbytes // 1024) * 1024
    body = f"""
const u32 bar = saddr(smem) + {room};
for (int i = t; i < {room} / 4; i += 32) ((u32*)smem)[i] = 0xA5A5A5A5;
asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
start(bar, {nbytes});
if (t == 0)
  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {{{registers}}}], [%2];" :: "r"(saddr(smem)), "l"(&map0), "r"(bar), {inputs} : "memory");
wait(bar);
for (int i = t; i < {room} / 4; i += 32) ((u32*)out)[i] = ((u32*)smem)[i];
"""
    return Case(name, body, (data,), room, smem=room + 64, maps=(spec,), helpers=WAIT)


def loads():
    data = hashed(64 * 1024, np.uint8, 61)
    bf16 = hashed(32 * 1024, np.uint16, 62) & 0xBFFF
    spans = {0: 64, 1: 16, 2: 32, 3: 64}
    for mode, inner in spans.items():
        spec = MapSpec(0, 9, (96, 40), (256,), (inner, 24), mode)
        for i, coords in enumerate(((0, 0), (64, 30), (-8, -5))):
            yield load_case(f"tma_2d_swizzle{mode}_{i}", spec, inner * 24 * 2, coords, bf16)
    spec = MapSpec(0, 0, (1000,), (), (256,))
    yield load_case("tma_1d", spec, 256, (800,), data)
    spec = MapSpec(0, 9, (64, 10, 3), (256, 2560), (64, 4, 2), 3)
    yield load_case("tma_3d", spec, 1024, (0, 8, 1), bf16)
    spec = MapSpec(0, 9, (64, 10, 2, 3), (256, 128, 2560), (64, 8, 2, 1), 3)
    yield load_case("tma_4d", spec, 2048, (0, 4, 0, 2), bf16)
    spec = MapSpec(0, 9, (64, 7, 2, 3, 2), (384, 128, 2688, 8064), (64, 8, 2, 1, 1), 3)
    yield load_case("tma_5d", spec, 2048, (0, 2, 0, 1, 1), bf16)
    spec = MapSpec(0, 0, (128, 33), (144,), (128, 16), 3)
    yield load_case("tma_2d_bytes", spec, 2048, (0, 20), data)
    spec = MapSpec(0, 9, (64, 40), (256,), (64, 16), 3, 0, (1, 2))
    yield load_case("tma_strided_box", spec, 64 * 8 * 2, (0, 5), bf16)


STORE_END = 'asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");'


FILL = "for (int i = t; i < 1024; i += 32) ((u32*)smem)[i] = ((const u32*)in0)[i];\n"
FILL += 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads();\n'


def store_case(name, spec, coords, data, initial):
    """One tensor store over ``initial``."""
    body = (
        FILL + 'if (t == 0) { asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group '
    )
    body += f'[%0, {{%2,%3}}], [%1];" :: "l"(&map0), "r"(saddr(smem)), "r"({coords[0]}), "r"({coords[1]})'
    body += f' : "memory"); {STORE_END} }}'
    return Case(name, body, (data,), initial.size, smem=4096, maps=(spec,), initial=initial)


def stores():
    data = hashed(8192, np.uint8, 63)
    initial = np.full(24 * 256, 0x11, np.uint8)
    for mode, inner in ((0, 64), (1, 16), (2, 32), (3, 64)):
        spec = MapSpec("out", 9, (96, 20), (256,), (inner, 16), mode)
        for i, coords in enumerate(((0, 0), (64, 10))):
            yield store_case(f"tma_store_swizzle{mode}_{i}", spec, coords, data, initial)
    numbers = (hashed(512, np.uint8, 64) & 63).astype(np.float32)
    for op, kind, dtype, code in (
        ("add", "f32", np.float32, 7),
        ("add", "f16", np.float16, 6),
        ("add", "bf16", None, 9),
        ("min", "s32", np.int32, 3),
        ("max", "u32", np.uint32, 2),
    ):
        if dtype is None:
            values = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            values = np.concatenate([values] * 4)
        else:
            values = np.concatenate([numbers] * 4).astype(dtype)
        start = values[::-1].copy().view(np.uint8)[:2048]
        body = (
            FILL
            + f'if (t == 0) {{ asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}'
        )
        body += f'{".noftz" if "16" in kind else ""}.{kind} [%0], [%1], 1024;" :: "l"(out), "r"(saddr(smem))'
        body += f' : "memory"); {STORE_END} }}'
        raw = np.resize(values.view(np.uint8), 8192).copy()
        yield Case(f"bulk_reduce_{op}_{kind}", body, (raw,), 2048, smem=4096, initial=start)
        spec = MapSpec("out", code, (64, 8), (64 * values.itemsize,), (16, 8), 0)
        body = (
            FILL
            + f'if (t == 0) {{ asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.bulk_group'
        )
        body += ' [%0, {%2,%3}], [%1];" :: "l"(&map0), "r"(saddr(smem)), "r"(8), "r"(2)'
        body += f' : "memory"); {STORE_END} }}'
        name = f"tma_reduce_{op}_{kind}"
        yield Case(name, body, (raw,), 2048, smem=4096, maps=(spec,), initial=start)


def copies():
    data = hashed(4096, np.uint8, 65)
    body = """
for (int i = t; i < 1024; i += 32) ((u32*)smem)[i] = 0x5A5A5A5A;
__syncwarp();
const u32 at = saddr(smem);
asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(at + t * 4), "l"(in0 + t * 4), "r"(t % 5));
asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(at + 512 + t * 8), "l"(in0 + 512 + t * 8), "r"(t % 9));
asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at + 1024 + t * 16), "l"(in0 + 1024 + t * 16), "r"(t % 17));
asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(at + 2048 + t * 16), "l"(in0 + 2048 + t * 16));
asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
__syncwarp();
for (int i = t; i < 1024; i += 32) ((u32*)out)[i] = ((u32*)smem)[i];
"""
    yield Case("cp_async", body, (data,), 4096, smem=4096)
    body = """
const u32 bar = saddr(smem) + 2048;
start(bar, 1024 + 16);
if (t == 0) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
               :: "r"(saddr(smem)), "l"(in0 + 16), "r"(bar) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
               :: "r"(saddr(smem) + 1024), "l"(in0 + 3200), "r"(bar) : "memory");
}
wait(bar);
for (int i = t; i < 260; i += 32) ((u32*)out)[i] = ((u32*)smem)[i];
"""
    yield Case("bulk_load", body, (data,), 1040, smem=4096, helpers=WAIT)
    body = """
const u32 bar = saddr(smem);
u32* o = (u32*)out; int n = 0;
if (t == 0) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 3;" :: "r"(bar) : "memory");
#define TEST(parity) { u32 ok; asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;" \\
    " selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(bar), "r"(parity) : "memory"); o[n++] = ok; }
  TEST(0) TEST(1)
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" :: "r"(bar) : "memory");
  TEST(0)
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
  TEST(0) TEST(1)
  u64 state;
  asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(bar) : "memory");
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" :: "r"(bar) : "memory");
  TEST(0) TEST(1)
  { u32 ok; asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2;"
    " selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(bar), "l"(state) : "memory"); o[n++] = ok; }
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" :: "r"(bar) : "memory");
  TEST(0) TEST(1)
}
"""
    yield Case("mbarrier_phases", body, (data,), 64, smem=64)


def risky():
    """Last, for a GPU faults on some of them: the emulator refuses those."""
    data = hashed(64 * 1024, np.uint8, 61)
    spec = MapSpec(0, 9, (40, 10), (256,), (32, 8), 0)
    yield load_case("tma_unaligned_x", spec, 512, (30, 6), data)
    for kind, code in (("bf16", 9), ("f16", 6), ("f32", 7)):
        size = 4 if kind == "f32" else 2
        spec = MapSpec(0, code, (40, 10), (256,), (64 // size, 8), 0, 1)
        yield load_case(f"tma_nan_fill_{kind}", spec, 512, (24, 6), data)
    data = hashed(8192, np.uint8, 63)
    initial = np.full(24 * 256, 0x11, np.uint8)
    for tag, coords in (("x", (-8, 0)), ("y", (0, -3)), ("far", (0, 100))):
        spec = MapSpec("out", 9, (96, 20), (256,), (64, 16), 3)
        yield store_case(f"tma_store_outside_{tag}", spec, coords, data, initial)


def cases():
    for group in (loads, copies, stores, risky):
        yield from group()
