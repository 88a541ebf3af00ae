"""Races between lanes whose accesses share 16 bytes of shared memory, which the checker keeps as one."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np
import pytest
from emulator import EmulatedDevice, EmulatorError, device_array
from emulator.toys import pointer

TYPES = {4: "u32", 8: "v2.u32", 16: "v4.u32"}
HEAD = "__shared__ __align__(16) char s[1024];\n__device__ unsigned at(int i) { return __cvta_generic_to_shared(s + i); }\n"
for size, kind in TYPES.items():
    given, taken = ("{" + ", ".join([x] * (size // 4)) + "}" for x in ("%1", "t"))
    if size == 4:
        given, taken = "%1", "t"
    HEAD += f"""
__device__ void put{size}(int i) {{ asm volatile("st.shared.{kind} [%0], {given};" :: "r"(at(i)), "r"(7) : "memory"); }}
__device__ unsigned get{size}(int i) {{ unsigned x; asm volatile("{{ .reg .b32 t; ld.shared.{kind} {taken}, [%1]; mov.b32 %0, t; }}" : "=r"(x) : "r"(at(i)) : "memory"); return x; }}"""
READ, WRITE, AFTER = (
    f"RACE: {what}"
    for what in (
        "read not ordered after a write",
        "write not ordered after a write",
        "write not ordered after a read",
    )
)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("put8(l * 8); put8(l * 8); x = get8(l * 8); put8(l * 8);", None),
        ("put4(l * 4); x = get4(l * 4); put4(l * 4);", None),
        ("put4((l ^ 1) * 4); x = get4((l ^ 1) * 4); put4((l ^ 1) * 4);", None),
        ("put8(l * 8); __syncwarp(); if (l < 16) x = get16(l * 16);", None),
        ("put8(l * 8); __syncwarp(); if (l < 16) x = get16(l * 16); __syncwarp(); put4(l * 4);", None),
        ("put4(l * 4); __syncwarp(); put8(l * 8); x = get8(l * 8);", None),
        ("x = get8(l * 8); x = get8((l ^ 1) * 8); __syncwarp(); put8(l * 8);", None),
        ("put8(l * 8); x = get8((l ^ 1) * 8);", READ),
        ("put4(l * 4); x = get4((l ^ 2) * 4);", READ),
        ("put8(l * 8); if (l < 16) x = get16(l * 16);", READ),
        ("put8(l * 8); x = get4(l * 4);", READ),
        ("put4(l * 4); __syncwarp(); put8(l * 8); x = get4(l * 4);", READ),
        ("put8(l * 8); put8((l ^ 1) * 8);", WRITE),
        ("put8(l * 8); put4(l * 4);", WRITE),
        ("put8(l * 8); if (l == 9) put16(64);", WRITE),
        ("x = get4(l * 4); put4((l ^ 3) * 4);", AFTER),
        ("x = get8(l * 8); put4(l * 4);", AFTER),
        ("x = get8(l * 8); x = get8((l ^ 1) * 8); put8(l * 8);", AFTER),
        ("if (l < 16) x = get16(l * 16); put8(l * 8);", AFTER),
    ],
)  # fmt: skip
def test_lanes_that_share_sixteen_bytes(body, fault, seed):
    source = f'{HEAD}\nextern "C" __global__ void k(unsigned* o) {{ int l = threadIdx.x; unsigned x = 0; {body} o[l] = x; }}'
    run(source, 32, fault, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_warps_that_exchange_what_lanes_wrote(size, ordered, seed):
    between = "__syncthreads();" if ordered else ""
    body = f"if (w == 0) put{size}(l * {size}); {between} if (w == 1) x = get{size}((31 - l) * {size});"
    source = f'{HEAD}\nextern "C" __global__ void k(unsigned* o) {{ int l = threadIdx.x % 32, w = threadIdx.x / 32; unsigned x = 0; {body} o[threadIdx.x] = x; }}'
    run(source, 64, None if ordered else f"{READ}|{AFTER}", seed)


def run(source, block, fault, seed):
    out = device_array(block, np.uint32)
    device = EmulatedDevice("sm_80")
    program = device.compile_source(source, ["-default-device"]).program("k")
    call = program, (1,), (block,), 0, [pointer(out)], [out]
    if fault:
        with pytest.raises(EmulatorError, match=fault):
            device.run(*call, seed=seed)
    else:
        device.run(*call, seed=seed)
