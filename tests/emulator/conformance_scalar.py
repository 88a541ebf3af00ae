"""Conversions, arithmetic, bits, warp exchanges, atomics, ldmatrix, mma."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np

try:
    from .conformance import Case, hashed
except ImportError:
    from conformance import Case, hashed

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.5, np.inf, -np.inf, np.nan, 447.9, 448.0]
EDGES += [464.0, 465.0, -500.0, 57344.0, 61440.0, 65504.0, 65519.9, 65520.0, 7e4, 3.4e38, 2**-9]
EDGES += [2**-10, 1.0001 * 2**-10, 2**-14, 2**-16, 2**-17, 2**-24, 2**-25, 1e-38, 1e-40, 1e-45]
EDGES += [2**31 - 1.0, 2**31, -(2.0**31), 4294967040.0, 2**32, 2**63, -1e30, 1.00390625, 1.01171875]


def floats(salt: int = 1, count: int = 1024) -> np.ndarray:
    """Edge values, then a spread of magnitudes."""
    bits = hashed(count, np.uint32, salt)
    x = (bits & 0x807FFFFF | ((bits >> 23) % 60 + 97) << 23).view(np.float32)
    with np.errstate(over="ignore"):
        x[: len(EDGES)] = np.array(EDGES, np.float32)
    return x


def lanewise(name, code, inputs, out="u32", **options):
    """``code`` computes ``r`` from ``a`` (and ``b``, ``c``: the inputs) for each element."""
    count = inputs[0].size
    kinds = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
    load = ""
    for i, (var, x) in enumerate(zip("abc", inputs, strict=False)):
        load += f"    {kinds[x.itemsize]} {var} = ((const {kinds[x.itemsize]}*)in{i})[i];\n"
    body = f"for (int i = t; i < {count}; i += 32) {{\n{load}    {out} r = 0;\n    {code}\n"
    body += f"    (({out}*)out)[i] = r;\n}}"
    size = {"u16": 2, "u32": 4, "u64": 8}[out]
    return Case(name, body, tuple(inputs), count * size, **options)


def unary(name, ptx, x, **options):
    code = f'asm("{ptx} %0, %1;" : "=r"(r) : "r"(a));'
    return lanewise(name, code, [x], **options)


def conversions():
    x, y = floats(1), floats(2)
    wild = hashed(1024, np.uint32, 3).view(np.float32)
    fp8 = np.arange(256, dtype=np.uint16) | np.arange(255, -1, -1, dtype=np.uint16) << 8
    halves = hashed(1024, np.uint32, 4)
    for kind in ("rn.bf16x2", "rn.f16x2", "rz.bf16x2", "rn.relu.f16x2", "rn.relu.bf16x2"):
        code = f'asm("cvt.{kind}.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
        for tag, inputs in (("", [x, y]), ("_wild", [wild, wild[::-1].copy()])):
            yield lanewise(f"cvt_{kind.replace('.', '_')}{tag}", code, inputs)
    for kind in ("e4m3x2", "e5m2x2"):
        for relu in ("", "relu."):
            tag = f"{kind}{'_relu' if relu else ''}"
            name = f"cvt.rn.satfinite.{relu}{kind}"
            code = f'u16 h; asm("{name}.f32 %0, %1, %2;" : "=h"(h) : "r"(a), "r"(b)); r = h;'
            yield lanewise(f"cvt_{tag}_f32", code, [x, y], out="u16")
            code = f'u16 h; asm("{name}.f16x2 %0, %1;" : "=h"(h) : "r"(a)); r = h;'
            yield lanewise(f"cvt_{tag}_f16x2", code, [halves], out="u16")
            code = f'asm("cvt.rn.{relu}f16x2.{kind} %0, %1;" : "=r"(r) : "h"(a));'
            yield lanewise(f"cvt_f16x2_{tag}", code, [fp8])
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for to in ("s32", "u32"):
            yield unary(f"cvt_{mode}_{to}_f32", f"cvt.{mode}.{to}.f32", x)
        yield unary(f"cvt_{mode}_f32_f32", f"cvt.{mode}.f32.f32", x)
    for to, kind in (("s64", "l"), ("u64", "l")):
        code = f'asm("cvt.rzi.{to}.f32 %0, %1;" : "={kind}"(r) : "r"(a));'
        yield lanewise(f"cvt_rzi_{to}_f32", code, [x], out="u64")
    for frm in ("s32", "u32"):
        for mode in ("rn", "rz"):
            yield unary(f"cvt_{mode}_f32_{frm}", f"cvt.{mode}.f32.{frm}", halves)
    big = hashed(256, np.uint64, 5)
    for frm in ("s64", "u64"):
        code = f'asm("cvt.rn.f32.{frm} %0, %1;" : "=r"(r) : "l"(a));'
        yield lanewise(f"cvt_f32_{frm}", code, [big])
    code = 'asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=r"(r) : "r"(a));'
    yield lanewise("cvt_f32_f16", code, [hashed(512, np.uint32, 6)])


def arithmetic():
    x, y, z = floats(7), floats(8), floats(9)
    near = (np.linspace(-20, 20, 1024)).astype(np.float32)
    near[: len(EDGES)] = x[: len(EDGES)]
    ops = {"ex2.approx.ftz": near, "ex2.approx": near, "lg2.approx.ftz": x, "rcp.approx.ftz": x}
    ops |= {"rsqrt.approx.ftz": x, "sqrt.approx.ftz": x, "tanh.approx": near}
    ops |= {"sqrt.rn": x, "rcp.rn": x}
    for op, values in ops.items():
        exact = op.endswith("rn")
        absolute = 5e-7 if op.startswith("lg2") else 1e-38  # lg2 is absolute near 1
        compare = "exact" if exact else (np.float32, 3e-4 if "tanh" in op else 3e-6, absolute)
        yield unary(op.replace(".", "_"), f"{op}.f32", values, compare=compare)
    small = np.linspace(-3, 3, 512).astype(np.float32)
    for op in ("sin", "cos"):
        yield unary(f"{op}_approx", f"{op}.approx.f32", small, compare=(np.float32, 0, 1e-6))
    for op in ("min", "max", "min.NaN", "max.NaN", "add.rn.ftz", "mul.rn.ftz", "add.rz", "mul.rm"):
        code = f'asm("{op}.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
        yield lanewise(op.replace(".", "_") + "_f32", code, [x, y])
    for op in ("fma.rn", "fma.rn.ftz", "fma.rz", "fma.rm", "fma.rp", "fma.rn.sat"):
        code = f'asm("{op}.f32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));'
        yield lanewise(op.replace(".", "_") + "_f32", code, [x, y, z])
    pairs = [
        np.where(
            hashed(512, np.uint32, s) & 0x7C00 == 0x7C00, 0x3C003C01, hashed(512, np.uint32, s)
        )
        for s in (11, 12, 13)
    ]
    pairs = [p.astype(np.uint32) & 0xBFFFBFFF for p in pairs]
    for kind in ("f16x2", "bf16x2"):
        for op in ("fma.rn", "fma.rn.relu", "min", "max", "max.NaN"):
            n = 3 if op.startswith("fma") else 2
            args = ", ".join(f"%{i + 1}" for i in range(n))
            regs = ", ".join(f'"r"({v})' for v in "abc"[:n])
            code = f'asm("{op}.{kind} %0, {args};" : "=r"(r) : {regs});'
            yield lanewise(f"{op.replace('.', '_')}_{kind}", code, pairs[:n])
    for op in ("add.rn", "mul.rn", "sub.rn"):
        code = f'asm("{op}.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
        yield lanewise(f"{op.replace('.', '_')}_f16x2", code, pairs[:2])
    compares = (
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    )
    code = "".join(
        f'{{ u32 q; asm("{{ .reg .pred p; setp.{c}.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }}" : "=r"(q)'
        f' : "r"(a), "r"(b)); r |= q << {i}; }}\n'
        for i, c in enumerate(compares)
    )
    tied = y.copy()
    tied[::3] = x[::3]
    yield lanewise("setp_f32", code, [x, tied])


def bits():
    a, b, c = (hashed(512, np.uint32, s) for s in (21, 22, 23))
    code = 'asm("prmt.b32{m} %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));'
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield lanewise(f"prmt{mode.replace('.', '_')}", code.replace("{m}", mode), [a, b, c])
    three = {"lop3": "lop3.b32 %0, %1, %2, %3, 0xCA", "mad_hi_s32": "mad.hi.s32 %0, %1, %2, %3"}
    three |= {"bfe_u32": "bfe.u32 %0, %1, %2, %3", "bfe_s32": "bfe.s32 %0, %1, %2, %3"}
    three |= {
        f"shf_{d}_{m}": f"shf.{d}.{m}.b32 %0, %1, %2, %3" for d in "lr" for m in ("wrap", "clamp")
    }
    three |= {"dp4a_u": "dp4a.u32.u32 %0, %1, %2, %3", "dp4a_s": "dp4a.s32.s32 %0, %1, %2, %3"}
    three |= {"sad_s32": "sad.s32 %0, %1, %2, %3", "mad24_lo_s32": "mad24.lo.s32 %0, %1, %2, %3"}
    small = [a, b & 63, c & 63]
    for name, ptx in three.items():
        inputs = small if name.startswith("bfe") else [a, b, c & 63] if "shf" in name else [a, b, c]
        text = f'asm("{ptx};" : "=r"(r) : "r"(a), "r"(b), "r"(c));'
        yield lanewise(name, text, inputs)
    text = 'asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c & 63), "r"(a >> 20 & 63));'
    yield lanewise("bfi_b32", text, [a, b, c])
    for op in ("bfind.u32", "bfind.s32", "bfind.shiftamt.u32", "clz.b32", "popc.b32", "brev.b32"):
        yield unary(op.replace(".", "_"), op, a >> (b & 31))
    text = 'asm("{ add.cc.u32 %0, %1, %2; addc.cc.u32 %0, %0, %3; addc.u32 %0, %0, 0; }" : "=&r"(r)'
    yield lanewise("carry", text + ' : "r"(a), "r"(b), "r"(c));', [a, b, c])
    for op in ("shl.b32", "shr.u32", "shr.s32"):
        text = f'asm("{op} %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
        yield lanewise(op.replace(".", "_"), text, [a, b & 63])
    safe = np.where(b % 5 == 0, 3, b).astype(np.uint32) >> (c & 31) | 1
    for op in ("div.s32", "rem.s32", "div.u32", "rem.u32"):
        text = f'asm("{op} %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));'
        yield lanewise(op.replace(".", "_"), text, [a, safe])


def warp():
    values = hashed(32, np.uint32, 31)
    body = "u32 a = ((const u32*)in0)[t], r = 0, q = 0;\n"
    n = 0
    for mode in ("up", "down", "bfly", "idx"):
        for b in (0, 1, 5, 16, 31):
            for c in (0 if mode == "up" else 0x1F, 0x1800 if mode == "up" else 0x181F, 0x1C07):
                body += f'asm volatile("{{ .reg .pred p; shfl.sync.{mode}.b32 %0|p, %2, {b}, {c}, '
                body += '0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(r), "=r"(q) : "r"(a));\n'
                body += f"((u32*)out)[{n} * 32 + t] = r; ((u32*)out)[{n + 1} * 32 + t] = q;\n"
                n += 2
    yield Case("shfl", body, (values,), n * 128)
    body = "u32 a = ((const u32*)in0)[t] & 7, r = 0; int n = 0;\n"
    names = ["match.any.sync.b32 %0, %1, 0xffffffff", "redux.sync.add.u32 %0, %1, 0xffffffff"]
    names += [
        f"redux.sync.{op} %0, %1, 0xffffffff" for op in ("min.s32", "max.u32", "and.b32", "xor.b32")
    ]
    for name in names:
        body += f'asm volatile("{name};" : "=r"(r) : "r"(a)); ((u32*)out)[n++ * 32 + t] = r;\n'
    body += 'asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 3; vote.sync.ballot.b32 %0, p, '
    body += '0xffffffff; }" : "=r"(r) : "r"(a)); ((u32*)out)[n++ * 32 + t] = r;\n'
    for reg in ("eq", "lt", "le", "gt", "ge"):
        body += f'asm volatile("mov.u32 %0, %%lanemask_{reg};" : "=r"(r)); ((u32*)out)[n++ * 32 + t] = r;\n'
    yield Case("warp", body, (values,), 12 * 128)
    kinds = {"inc": "u32", "dec": "u32", "min": "s32", "max": "u32", "xor": "b32", "exch": "b32"}
    body = "u32 a = ((const u32*)in0)[t], r = 0; u32* o = (u32*)out;\n"
    for i, (op, kind) in enumerate(kinds.items()):
        address = f"o + {i * 32} + t"
        body += f'asm volatile("atom.global.{op}.{kind} %0, [%1], %2;" : "=r"(r) : "l"({address}),'
        body += f' "r"(a) : "memory"); o[{(i + 6) * 32} + t] = r;\n'
    body += 'asm volatile("red.global.add.noftz.f16x2 [%0], %1;" :: "l"(o + 384 + t), "r"(a & 0x3bff3bff));\n'
    body += (
        'asm volatile("red.global.add.f32 [%0], %1;" :: "l"(o + 416 + t), "r"(a & 0x3fffffff));\n'
    )
    yield Case("atomics", body, (values,), 448 * 4, initial=hashed(448, np.uint32, 32) & 0x3BFF3BFF)


def matrices():
    data = hashed(1024, np.uint16, 41)
    stage = (
        "for (int i = t; i < 512; i += 32) ((u32*)smem)[i] = ((const u32*)in0)[i];\n__syncwarp();\n"
    )
    body = (
        stage
        + "u32 r[4]; u32* o = (u32*)out; int n = 0; u32 at = saddr(smem) + (t * 37 % 32) * 16;\n"
    )
    for trans in ("", ".trans"):
        for x in (1, 2, 4):
            regs = ",".join(f"%{i}" for i in range(x))
            outs = ", ".join(f'"=r"(r[{i}])' for i in range(x))
            body += f'asm volatile("ldmatrix.sync.aligned.m8n8.x{x}{trans}.shared.b16 {{{regs}}}, [%{x}];"'
            body += f' : {outs} : "r"(at));\n'
            body += "".join(f"o[n++ * 32 + t] = r[{i}];\n" for i in range(x))
    body += (
        'asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r[0]) : "r"(r[1]));\n'
    )
    body += "o[n++ * 32 + t] = r[0];\n"
    for trans in ("", ".trans"):
        body += "__syncwarp();\n"
        body += f'asm volatile("stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%0], {{%1,%2,%3,%4}};" ::'
        body += ' "r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); __syncwarp();\n'
        body += "for (int i = 0; i < 4; i++) o[n++ * 32 + t] = ((u32*)smem)[i * 32 + t];\n"
    yield Case("ldmatrix_stmatrix", body, (data,), 23 * 128, smem=2048)
    shapes = [("m16n8k16", t, 4, 2) for t in ("f16", "bf16")] + [
        ("m16n8k8", t, 2, 1) for t in ("f16", "bf16")
    ]
    shapes += [("m16n8k32", f"{a}.{b}", 4, 2) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    for shape, kind, na, nb in shapes:
        pair = kind if "." in kind else f"{kind}.{kind}"
        for acc in ("f32", "f16") if kind == "f16" else ("f32",):
            yield mma(shape, pair, acc, na, nb)


def mma(shape, pair, acc, na, nb):
    wide = "f16" in pair
    bits = {"f16": 0x3C00, "bf16": 0x3F80}.get(pair.split(".")[0], 0)
    count = 32 * (na + nb)
    if wide:
        raw = hashed(2 * count, np.uint16, 51)
        data = (raw & 0x807F | bits | (raw >> 7 & 1) << (10 if bits == 0x3C00 else 7)).astype(
            np.uint16
        )
    else:
        data = hashed(4 * count, np.uint8, 52) & 0xBF
    nd = 4 if acc == "f32" else 2
    body = f"const u32* p = (const u32*)in0; u32 d[{nd}] = {{}}, a[{na}], b[{nb}];\n"
    body += f"for (int i = 0; i < {na}; i++) a[i] = p[i * 32 + t];\n"
    body += f"for (int i = 0; i < {nb}; i++) b[i] = p[({na} + i) * 32 + t];\n"
    n = 0
    groups = []
    for size in (nd, na, nb):
        groups.append("{" + ",".join(f"%{n + i}" for i in range(size)) + "}")
        n += size
    outs = ", ".join(f'"+r"(d[{i}])' for i in range(nd))
    ins = ", ".join(f'"r"({v}[{i}])' for v, size in (("a", na), ("b", nb)) for i in range(size))
    name = f"mma.sync.aligned.{shape}.row.col.{acc}.{pair}.{acc}"
    body += (
        f'for (int k = 0; k < 2; k++) asm volatile("{name} {groups[0]}, {groups[1]}, {groups[2]}, '
    )
    body += f'{groups[0]};" : {outs} : {ins});\n'
    body += f"for (int i = 0; i < {nd}; i++) ((u32*)out)[i * 32 + t] = d[i];"
    compare = (np.float32, 2e-3 if not wide else 1e-5, 1e-2 if not wide else 1e-5)
    if acc == "f16":
        compare = (np.float16, 4e-3, 1e-2)
    return Case(
        f"mma_{shape}_{pair.replace('.', '_')}_{acc}", body, (data,), nd * 128, compare=compare
    )


def cases():
    for group in (conversions, arithmetic, bits, warp, matrices):
        yield from group()
