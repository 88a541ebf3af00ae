"""wgmma: descriptors, swizzles, majors, shapes, types."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np

try:
    from .conformance import Case, hashed
except ImportError:
    from conformance import Case, hashed

HELPERS = """
__device__ inline u64 desc(u32 addr, u32 lead, u32 stride, u64 mode) {
  return (u64)((addr & 0x3ffff) >> 4) | (u64)(lead >> 4) << 16 | (u64)(stride >> 4) << 32 | mode << 62;
}
"""
SMEM = 64 * 1024
MODES = {"none": 0, "128": 1, "64": 2, "32": 3}


def small_numbers(dtype: str, count: int, salt: int) -> np.ndarray:
    """Whole numbers from -3 to 3: sums are exact whatever the order."""
    values = (hashed(count, np.uint8, salt) % 7).astype(np.float32) - 3
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint8)
    codes = {"e4m3": [0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44]}
    codes["e5m2"] = [0xC2, 0xC0, 0xBC, 0x00, 0x3C, 0x40, 0x42]
    return np.array(codes[dtype], np.uint8)[(values + 3).astype(np.int32)]


def wgmma(
    name,
    n,
    kind="bf16.bf16",
    acc="f32",
    a=(0, 16, 1024, "128"),
    b=(16384, 16, 1024, "128"),
    major="0, 0",
    registers=False,
    signs="1, 1",
    data=None,
    compare="exact",
):
    """a, b: offset in shared memory, leading and stride byte offset, swizzle."""
    ta, tb = kind.split(".")
    wide = ta in ("bf16", "f16")
    count = n // (2 if acc == "f32" else 4)
    if data is None:
        half = SMEM // (4 if wide else 2)
        parts = [small_numbers(ta, half, 71), small_numbers(tb, half, 72)]
        swap = 16384
        data = np.concatenate([parts[0][:swap], parts[1]])[:SMEM]
        data = np.resize(data, SMEM).copy()
    regs = "{" + ",".join(f"%{i}" for i in range(count)) + "}"
    at = count
    if registers:
        source = "{" + ",".join(f"%{at + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(p[{i}])' for i in range(4))
        at += 4
        major = major.split(",")[-1].strip()
    else:
        source, inputs = f"%{at}", '"l"(da)'
        at += 1
    tail = f", {signs}" + (f", {major}" if wide else "")
    outs = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    shape = f"m64n{n}k{16 if wide else 32}"
    body = f"""
for (int i = t; i < {SMEM} / 16; i += 128) ((uint4*)smem)[i] = ((const uint4*)in0)[i];
asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
__syncthreads();
u32 d[{count}], p[4];
for (int i = 0; i < {count}; i++) d[i] = 0;
for (int i = 0; i < 4; i++) p[i] = ((const u32*)in0)[(t * 4 + i) * 5 % 4096];
const u64 da = desc(saddr(smem) + {a[0]}, {a[1]}, {a[2]}, {MODES[a[3]]});
const u64 db = desc(saddr(smem) + {b[0]}, {b[1]}, {b[2]}, {MODES[b[3]]});
(void)da; (void)p;
asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
for (int k = 0; k < 2; k++)
  asm volatile("{{ .reg .pred q; setp.ne.b32 q, %{at + 1}, 0; wgmma.mma_async.sync.aligned.{shape}.{acc}.{kind} {regs}, {source}, "
               "%{at}, q{tail}; }}" : {outs} : {inputs}, "l"(db), "r"(k));
asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
for (int i = 0; i < {count}; i++) ((u32*)out)[i * 128 + t] = d[i];
"""
    return Case(name, body, (data,), count * 512, 128, SMEM, helpers=HELPERS, compare=compare)


def cases():
    for n in (8, 24, 64, 96, 128, 176, 192, 256):
        yield wgmma(f"wgmma_n{n}", n)
    pitch = {"128": 1024, "64": 512, "32": 256}
    for mode, stride in pitch.items():
        a, b = (0, 16, stride, mode), (16384, 16, stride, mode)
        yield wgmma(f"wgmma_k_major_{mode}", 64, a=a, b=b)
        step = {"128": 96, "64": 32, "32": 0}[mode]
        a, b = (step, 16, stride, mode), (16384 + step, 16, stride, mode)
        yield wgmma(f"wgmma_k_major_{mode}_advanced", 64, a=a, b=b)
        a, b = (0, 16, stride + 1024, mode), (16384, 16, stride + 2048, mode)
        yield wgmma(f"wgmma_k_major_{mode}_far", 32, a=a, b=b)
    a, b = (0, 2048, 128, "none"), (16384, 4096, 256, "none")
    yield wgmma("wgmma_k_major_none", 64, a=a, b=b)
    a, b = (0, 128, 256, "none"), (16384, 128, 256, "none")
    yield wgmma("wgmma_k_major_none_packed", 64, a=a, b=b)
    for mode, stride in pitch.items():
        n = 128
        for tag, lead in (("", 8 * stride), ("_near", 2 * stride)):
            b = (16384, lead, stride, mode)
            yield wgmma(f"wgmma_b_mn_{mode}{tag}", n, b=b, major="0, 1")
            yield wgmma(f"wgmma_a_mn_{mode}{tag}", 64, a=(0, lead, stride, mode), major="1, 0")
        b = (16384 + stride * 2, 8 * stride, stride, mode)
        yield wgmma(f"wgmma_b_mn_{mode}_advanced", 64, b=b, major="0, 1")
    b = (16384, 4096, 128, "none")
    yield wgmma("wgmma_b_mn_none", 64, b=b, major="0, 1")
    yield wgmma("wgmma_a_mn_none", 64, a=(0, 2048, 128, "none"), b=b, major="1, 1")
    yield wgmma("wgmma_rs", 64, registers=True)
    yield wgmma("wgmma_rs_mn", 128, registers=True, b=(16384, 8192, 1024, "128"), major="0, 1")
    yield wgmma("wgmma_f16", 64, "f16.f16")
    yield wgmma("wgmma_f16_acc_f16", 64, "f16.f16", "f16")
    yield wgmma("wgmma_signs", 64, signs="-1, 1")
    for kind in ("e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3", "e5m2.e5m2"):
        yield wgmma(f"wgmma_{kind.replace('.', '_')}", 64, kind)
    for mode, stride in pitch.items():
        b = (16384, 16, stride, mode)
        yield wgmma(f"wgmma_fp8_{mode}", 96, "e4m3.e4m3", b=b)
    yield wgmma("wgmma_fp8_rs", 128, "e4m3.e4m3", registers=True)
    yield wgmma("wgmma_fp8_f16", 32, "e4m3.e4m3", "f16")
    real = hashed(SMEM // 2, np.uint16, 73) & 0xBFFF
    real = np.where((real >> 7 & 255) < 120, 0x3F80, real).astype(np.uint16)
    yield wgmma("wgmma_bf16_real", 64, data=real.view(np.uint8), compare=(np.float32, 2e-5, 1e-3))
    raw = hashed(SMEM, np.uint8, 74) & 0xBF
    yield wgmma("wgmma_fp8_real", 64, "e4m3.e4m3", data=raw)
