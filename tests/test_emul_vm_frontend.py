"""The front end: scopes, calls, variables, and what it refuses."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError, PtxError, device_array
from emulator.ptx import parse
from emulator.toys import pointer

HEAD = 'extern "C" __global__ void k'


def program(source, arch="sm_80", name="k"):
    return EmulatedDevice(arch).compile_source(source, ["-default-device"]).program(name)


def run(source, arrays, grid=1, block=32, smem=0, extra=(), **options):
    args = [*(pointer(a) for a in arrays), *extra]
    loaded = source if not isinstance(source, str) else program(source)
    return EmulatedDevice("sm_80").run(loaded, (grid,), (block,), smem, args, arrays, **options)


def test_function_with_local_array_and_pointer_argument():
    out = device_array(32, np.float32)
    source = (
        "__noinline__ float sum(const float* p, int n) { float s = 0; for (int i = 0; i < n; i++) s += p[i]; return s; }\n"
        + HEAD
        + "(float* o) { float a[20]; for (int i = 0; i < 20; i++) a[(i * 7 + threadIdx.x) % 20] = i * (int)threadIdx.x;\n"
        "  o[threadIdx.x] = sum(a, 20) + sum(a + 3, 0) + 1000 * sum(a, 1); }"
    )
    run(source, [out])
    lanes = np.arange(32)
    first = [next(i for i in range(20) if (i * 7 + t) % 20 == 0) * t for t in range(32)]
    np.testing.assert_array_equal(out, lanes * 190 + 1000 * np.array(first))


def test_module_variables_keep_their_values_between_launches():
    out = device_array(2, np.int32)
    source = (
        "__constant__ int table[4] = {5, 6, 7, 8}; __device__ int calls = 40;\n"
        + HEAD
        + "(int* o, int i) { if (threadIdx.x == 0) { o[0] = table[i & 3]; o[1] = ++calls; } }"
    )
    kernel = program(source)
    for i in range(3):
        run(kernel, [out], extra=[np.int32(i)])
        assert out.tolist() == [5 + i, 41 + i]


def test_labels_and_registers_of_asm_blocks_are_local():
    out = device_array(32, np.int32)
    source = (
        '__device__ inline int halvings(int x) { int n; asm volatile("{ .reg .pred P; .reg .s32 v; mov.s32 v, %1; mov.s32 %0, 0;\\n"\n'
        '  "L: setp.lt.s32 P, v, 2; @P bra D; shr.s32 v, v, 1; add.s32 %0, %0, 1; bra L; D: }" : "=&r"(n) : "r"(x)); return n; }\n'
        + HEAD
        + "(int* o) { o[threadIdx.x] = halvings(threadIdx.x) + 100 * halvings(threadIdx.x * 8); }"
    )
    run(source, [out])
    log2 = np.array([0, 0, *(np.floor(np.log2(np.arange(2, 32))))])
    wide = np.array([0, *(np.floor(np.log2(np.arange(1, 32) * 8)))])
    np.testing.assert_array_equal(out, log2 + 100 * wide)


def test_branch_table():
    out = device_array(32, np.int32)
    source = (
        HEAD
        + '(int* o) { int r; asm volatile("{ TAB: .branchtargets A, B, C; brx.idx %1, TAB; A: mov.s32 %0, 10; bra E;'
        ' B: mov.s32 %0, 20; bra E; C: mov.s32 %0, 30; E: }" : "=r"(r) : "r"(threadIdx.x % 3)); o[threadIdx.x] = r; }'
    )
    run(source, [out])
    np.testing.assert_array_equal(out, 10 + 10 * (np.arange(32) % 3))


def test_lanes_that_loop_for_different_times_meet_again():
    out = device_array((2, 32), np.int32)
    source = (
        HEAD
        + "(int* o) { int n = 0; for (unsigned x = threadIdx.x + 1; x != 1; n++) x = x & 1 ? 3 * x + 1 : x / 2;\n"
        "  o[threadIdx.x] = n; o[32 + threadIdx.x] = __reduce_add_sync(~0u, n); }"
    )
    run(source, [out])

    def steps(x):
        return 0 if x == 1 else 1 + steps(3 * x + 1 if x & 1 else x // 2)

    expected = np.array([steps(x + 1) for x in range(32)])
    np.testing.assert_array_equal(out[0], expected)
    assert np.all(out[1] == expected.sum())


def test_struct_parameter_by_value_and_by_address():
    out = device_array(4, np.int64)
    kind = np.dtype([("a", "<i4"), ("b", "<i8"), ("c", "<i4", (5,))], align=True)
    value = np.zeros((), kind)
    value["a"], value["b"], value["c"] = -3, 1 << 40, [10, 11, 12, 13, 14]
    source = (
        "struct S { int a; long long b; int c[5]; };\n"
        + HEAD
        + "(long long* o, const __grid_constant__ S s, int i) { o[0] = s.a; o[1] = s.b; o[2] = s.c[i];\n"
        "  const S* p = &s; o[3] = ((volatile const S*)p)->c[i + 1]; }"
    )
    run(source, [out], block=1, extra=[value, np.int32(2)])
    assert out.tolist() == [-3, 1 << 40, 12, 13]


def test_block_that_ends_within_a_warp():
    out = device_array(40, np.int32)
    source = HEAD + "(int* o) { o[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0); }"
    run(source, [out], block=40)
    assert set(out.tolist()) == {14}


def test_three_dimensional_ids():
    out = device_array((2, 3, 4, 2, 2, 4), np.int32)
    source = (
        HEAD
        + "(int* o) { int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;\n"
        "  int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;\n"
        "  o[b * blockDim.x * blockDim.y * blockDim.z + t] = b * 100 + t; }"
    )
    EmulatedDevice("sm_80").run(program(source), (4, 3, 2), (4, 2, 2), 0, [pointer(out)], [out])
    blocks = np.arange(24)[:, None] * 100 + np.arange(16)
    np.testing.assert_array_equal(out.reshape(24, 16), blocks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.b32 %0, %0;", "unknown instruction frobnicate"),
        ("add.s33 %0, %0, %0;", "unknown instruction add.s33"),
        ("add.u32 %0, %0, nowhere;", "operand nowhere"),
        ("cvt.rn.bf16.f64 %0, %0;", "bits|conversion|operand"),
        ("ld.global.v3.u32 {%0, %0, %0}, [%0];", "unknown access|vector"),
        ("bra NOWHERE;", "label NOWHERE"),
    ],
)
def test_unknown_ptx_is_refused_when_it_is_loaded(text, message):
    source = HEAD + f'(int* o) {{ int r = 0; asm volatile("{text}" : "+r"(r)); o[0] = r; }}'
    with pytest.raises(PtxError, match=message):
        program(source)


def test_recursion_is_refused():
    source = (
        "__noinline__ int f(int n, int* o) { if (n < 2) return *o; return f(n - 1, o + 1) + f(n - 2, o); }\n"
        + HEAD
        + "(int* o, int n) { o[0] = f(n, o); }"
    )
    with pytest.raises(PtxError, match="recursion"):
        program(source)


def test_clusters_that_cannot_be_launched():
    out = device_array(1, np.int32)
    source = HEAD.replace("void k", "void __cluster_dims__(2, 1, 1) k") + "(int* o) { o[0] = 1; }"
    kernel = program(source, "sm_90")
    with pytest.raises(EmulatorError, match="whole clusters"):
        run(kernel, [out], grid=3)
    with pytest.raises(EmulatorError, match="kernel declares"):
        run(kernel, [out], grid=4, cluster=(4,))
    plain = program(HEAD + "(int* o) { o[0] = 1; }", "sm_90")
    with pytest.raises(EmulatorError, match="at most 8"):
        run(plain, [out], grid=16, cluster=(16,))


def test_parser_reads_declarations():
    module = parse(
        ".version 8.0\n.target sm_80\n.address_size 64\n"
        ".global .align 8 .b8 g[5] = {1, 2, 255};\n.extern .shared .align 16 .b8 s[];\n"
        ".visible .entry e(.param .u64 p0, .param .align 8 .b8 p1[24])\n.maxntid 128, 1, 1\n{\n"
        '.file 1 "x.cu"\n\t.loc 1 3 0\n\tret;\n}\n'
    )
    assert module.symbols["g"].data == bytes([1, 2, 255])
    assert (module.symbols["g"].nbytes, module.symbols["g"].align) == (5, 8)
    assert module.symbols["s"].dynamic
    assert [p.nbytes for p in module.functions["e"].params] == [8, 24]
    assert module.functions["e"].items == [("loc", "1 3 0"), ("do", "ret")]


CONVERSIONS = {  # PTX lets a wider register stand for a narrower type in cvt
    "cvt.s64.s32 %0, %1;": lambda x: x.astype(np.int32).astype(np.int64),
    "cvt.u64.u32 %0, %1;": lambda x: x & 0xFFFFFFFF,
    "cvt.u64.u16 %0, %1;": lambda x: x & 0xFFFF,
    "cvt.s32.s8 %0, %1;": lambda x: x.astype(np.int8).astype(np.int64),
    "cvt.u32.u64 %0, %1;": lambda x: x & 0xFFFFFFFF,
}


@pytest.mark.parametrize("text", CONVERSIONS)
def test_conversions_from_and_to_wider_registers(text):
    values = device_array(32, np.uint64, np.arange(32, dtype=np.uint64) * 0x1_0000_3001_F0FF)
    values[::3] += np.uint64(0x4100_0000)
    out = device_array(32, np.int64)
    asm = f'long long y; asm("{text}" : "=l"(y) : "l"(x[threadIdx.x])); o[threadIdx.x] = y;'
    run(HEAD + f"(const long long* x, long long* o) {{ {asm} }}", [values, out])
    expected = CONVERSIONS[text](values)
    if "s32.s8" in text or "u32" in text:  # what is above the type is not the result's
        out, expected = out.astype(np.uint32), expected.astype(np.uint32)
    np.testing.assert_array_equal(out, expected)


def test_a_wider_register_is_refused_where_ptxas_refuses_it():
    asm = 'long long y = 0; asm volatile("add.u32 %0, %0, 1;" : "+l"(y));'
    with pytest.raises(PtxError, match=r"64 bits|operand"):
        program(HEAD + f"(int* o) {{ {asm} *o = int(y); }}")
