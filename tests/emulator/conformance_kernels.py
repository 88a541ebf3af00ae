"""Instructions and operand types that the library's kernels use, where no other list has them."""

# ruff: noqa: E501  (lines of PTX)

from __future__ import annotations

import numpy as np

try:
    from .conformance import Case, MapSpec, hashed
    from .conformance_scalar import floats, lanewise, unary
    from .conformance_tensor import FILL, STORE_END
    from .conformance_wgmma import wgmma
except ImportError:
    from conformance import Case, MapSpec, hashed
    from conformance_scalar import floats, lanewise, unary
    from conformance_tensor import FILL, STORE_END
    from conformance_wgmma import wgmma

__all__ = ["cases"]


def with_tiny(salt):
    """Floats, every fourth of them subnormal."""
    x = floats(salt)
    bits = x.view(np.uint32)
    bits[64::4] &= np.uint32(0x807FFFFF)
    return bits.view(np.float32)


def floats32():
    x, y, z = with_tiny(91), with_tiny(92), with_tiny(93)
    wild = hashed(1024, np.uint32, 94).view(np.float32)
    for op in ("abs.ftz", "neg.ftz", "rcp.rn.ftz", "cvt.ftz.sat.f32", "cvt.sat.f32"):
        for tag, values in (("", x), ("_wild", wild)):
            yield unary(f"{op.replace('.', '_')}_f32{tag}", f"{op}.f32", values)
    for mode in ("rni", "rzi", "rmi", "rpi"):
        yield unary(f"cvt_{mode}_ftz_f32_f32", f"cvt.{mode}.ftz.f32.f32", x)
        yield unary(f"cvt_{mode}_ftz_s32_f32", f"cvt.{mode}.ftz.s32.f32", x)
    two = ["mul.ftz", "mul", "add.ftz", "sub.ftz", "min.ftz", "max.ftz", "div.rn", "div.rn.ftz"]
    for op in (*two, "copysign"):
        code = f'asm("{op}.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
        for tag, inputs in (("", [x, y]), ("_wild", [wild, wild[::-1].copy()])):
            yield lanewise(f"{op.replace('.', '_')}_f32_kernels{tag}", code, inputs)
    code = 'asm("div.approx.ftz.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
    normal = [floats(95), floats(96)]
    normal = [np.where(np.abs(v) > 1e15, np.float32(1.5), v) for v in normal]
    yield lanewise("div_approx_ftz_f32", code, normal, compare=(np.float32, 3e-6, 1e-37))
    for op in ("fma.rm.ftz", "fma.rn.ftz"):
        code = f'asm("{op}.f32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));'
        yield lanewise(f"{op.replace('.', '_')}_f32_tiny", code, [x, y, z])
    near = (y.view(np.uint32) & np.uint32(0x007FFFFF)).view(np.float32)
    tied = np.where(np.arange(1024) % 3 == 0, x, np.where(np.arange(1024) % 3 == 1, y, near))
    compares = ["eq", "lt", "le", "gt", "ge", "neu", "ltu", "leu", "gtu", "geu"]
    code = "".join(
        f'{{ u32 q; asm("{{ .reg .pred p; setp.{c}.ftz.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }}" : "=r"(q)'
        f' : "r"(a), "r"(b)); r |= q << {i}; }}\n'
        for i, c in enumerate(compares)
    )
    yield lanewise("setp_ftz_f32", code, [x, tied.astype(np.float32)])


def integers():
    a, b = hashed(512, np.uint32, 101), hashed(512, np.uint32, 102)
    wide, other = hashed(512, np.uint64, 103), hashed(512, np.uint64, 104)
    code = 'asm("mul.hi.u64 %0, %1, %2;" : "=l"(r) : "l"(a), "l"(b));'
    yield lanewise("mul_hi_u64", code, [wide, other], out="u64")
    for op in ("mul.hi.u32", "mul.hi.s32", "mul.wide.u16"):
        kind = "h" if op.endswith("16") else "r"
        inputs = [v.astype(np.uint16) for v in (a, b)] if kind == "h" else [a, b]
        code = f'asm("{op} %0, %1, %2;" : "=r"(r) : "{kind}"(a), "{kind}"(b));'
        yield lanewise(op.replace(".", "_"), code, inputs)
    divisor = np.where(other >> np.uint64(60), other >> (other & np.uint64(63)), 7) | np.uint64(1)
    for op in ("div.s64", "div.u64", "rem.s64", "min.s64", "max.s64"):
        code = f'asm("{op} %0, %1, %2;" : "=l"(r) : "l"(a), "l"(b));'
        yield lanewise(op.replace(".", "_"), code, [wide, divisor.astype(np.uint64)], out="u64")
    halves = [v.astype(np.uint16) for v in (a, b | 1)]
    for op in ("div.u16", "rem.u16", "add.s16", "sub.s16", "mul.lo.s16", "shr.u16"):
        second = "h" if not op.startswith("shr") else "r"
        code = f'u16 h; asm("{op} %0, %1, %2;" : "=h"(h) : "h"(a), "{second}"({"b" if second == "h" else "(u32)b & 31"})); r = h;'
        yield lanewise(op.replace(".", "_"), code, halves, out="u16")
    for to, frm in (("s32", "s8"), ("u32", "u8"), ("s32", "s16")):
        code = f'asm("cvt.{to}.{frm} %0, %1;" : "=r"(r) : "r"(a));'
        code = f'asm("{{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.{to}.{frm} %0, h; }}" : "=r"(r) : "r"(a));'
        yield lanewise(f"cvt_{to}_{frm}", code, [a])
    code = 'asm("bfi.b64 %0, %1, %2, %3, %4;" : "=l"(r) : "l"(a), "l"(b), "r"((u32)a & 63), "r"((u32)b & 63));'
    yield lanewise("bfi_b64", code, [wide, other], out="u64")
    for op in ("shr.s64", "shr.u64", "shl.b64"):
        code = f'asm("{op} %0, %1, %2;" : "=l"(r) : "l"(a), "r"((u32)b & 127));'
        yield lanewise(op.replace(".", "_"), code, [wide, other], out="u64")


def together():
    values = hashed(32, np.uint32, 111)
    body = "u32 a = ((const u32*)in0)[t], r = 0; int n = 0;\n"
    for op in ("add.s32", "max.s32", "min.s32", "max.u32", "min.u32"):
        body += f'asm volatile("redux.sync.{op} %0, %1, 0xffffffff;" : "=r"(r) : "r"(a)); ((u32*)out)[n++ * 32 + t] = r;\n'
    for limit in ("0", "0x80000000", "0xffffffff"):
        for op in ("all", "any", "uni"):
            body += f'asm volatile("{{ .reg .pred p; setp.ge.u32 p, %1, {limit}; vote.sync.{op}.pred p, p, 0xffffffff; selp.u32 %0, 1, 0, p; }}" : "=r"(r) : "r"(a)); ((u32*)out)[n++ * 32 + t] = r;\n'
    yield Case("redux_vote", body, (values,), 14 * 128)
    body = "u32 a = ((const u32*)in0)[t], r = 0; int n = 0;\n"
    for limit in ("0", "0x80000000", "0xffffffff"):
        for op in ("and.pred", "or.pred", "popc.u32"):
            to = "%0" if op == "popc.u32" else "p"
            body += f'asm volatile("{{ .reg .pred p; setp.ge.u32 p, %1, {limit}; barrier.cta.red.aligned.{op} {to}, 1, 128, p; '
            body += (
                '}" : "=r"(r) : "r"(a));'
                if to == "%0"
                else 'selp.u32 %0, 1, 0, p; }" : "=r"(r) : "r"(a));'
            )
            body += " ((u32*)out)[n++ * 128 + t] = r;\n"
    yield Case("barrier_red", body, (hashed(128, np.uint32, 112),), 9 * 512, threads=128)
    kinds = {"add": "u32", "exch": "b32", "min": "s32", "max": "s32", "inc": "u32", "cas": "b32"}
    for space in ("shared", "global"):
        own = (
            "saddr(smem) + {i} * 128 + t * 4"
            if space == "shared"
            else "(u64)(out + {i} * 128 + t * 4)"
        )
        body = "u32 a = ((const u32*)in0)[t], r = 0; u32* o = (u32*)out;\n"
        if space == "shared":
            body += f"for (int i = 0; i < {len(kinds)}; i++) ((u32*)smem)[i * 32 + t] = o[i * 32 + t];\n"
        for i, (op, kind) in enumerate(kinds.items()):
            at, letter = own.format(i=i), "r" if space == "shared" else "l"
            more, operand = (", %3", f', "r"(a ^ {i})') if op == "cas" else ("", "")
            second = f'"r"(o[{i} * 32 + t] ^ (t & 1))' if op == "cas" else '"r"(a)'
            body += f'asm volatile("atom.acq_rel.gpu.{space}.{op}.{kind} %0, [%1], %2{more};" : "=r"(r) : "{letter}"({at}), {second}{operand} : "memory");\n'
            body += f"o[{(i + len(kinds)) * 32} + t] = r;\n"
        if space == "shared":
            body += f"for (int i = 0; i < {len(kinds)}; i++) o[i * 32 + t] = ((u32*)smem)[i * 32 + t];\n"
        initial = np.concatenate([hashed(32 * 6, np.uint32, 113), np.zeros(32 * 6, np.uint32)])
        yield Case(f"atom_{space}", body, (values,), 12 * 128, smem=1024, initial=initial)


def tiles():
    """Products and boxes of the sizes that kernels use."""
    for kind in ("f16.f16", "bf16.bf16"):
        for n in (48, 80, 112):
            yield wgmma(f"wgmma_{kind[: kind.index('.')]}_n{n}", n, kind)
    for n in (32, 96, 128, 192, 256):
        yield wgmma(f"wgmma_f16_n{n}", n, "f16.f16")
    for n in (192, 256):
        b = (16384, 8192, 1024, "128")
        yield wgmma(f"wgmma_rs_mn_n{n}", n, registers=True, b=b, major="0, 1")
        yield wgmma(f"wgmma_f16_rs_mn_n{n}", n, "f16.f16", registers=True, b=b, major="0, 1")
    yield wgmma("wgmma_fp8_n64_rs", 64, "e4m3.e4m3", registers=True)
    data, initial = hashed(8192, np.uint8, 121), np.full(24 * 256 * 2, 0x11, np.uint8)
    for mode in (0, 3):
        spec = MapSpec("out", 9, (96, 20, 2), (256, 256 * 24), (64, 8, 2), mode)
        for i, at in enumerate(((0, 0, 0), (64, 16, 1))):
            coords = ", ".join(f'"r"({c})' for c in at)
            body = (
                FILL
                + 'if (t == 0) { asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];"'
                + f' :: "l"(&map0), "r"(saddr(smem)), {coords} : "memory"); {STORE_END} }}'
            )
            name = f"tma_store_3d_swizzle{mode}_{i}"
            yield Case(name, body, (data,), initial.size, smem=4096, maps=(spec,), initial=initial)


def cases():
    for group in (floats32, integers, together, tiles):
        yield from group()
