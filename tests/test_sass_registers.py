"""Registers of products in machine code: small texts with and without a fault, and a kernel."""

from __future__ import annotations

import pytest
from sass import disassembler, instructions
from sass_registers import Code

from cupyflash.runtime.prefill_plan import prefill_variants

# A tile that runs again, as ptxas 13.0 had it: weights of a key tile where its queries were.
LOOP = """
LDSM.16.M88.4 R152, [R11]
FADD R3, R3, R2
{head}WARPGROUP.ARRIVE
HGMMA.64x128x16.F32 R88, R152, gdesc[UR16], RZ, !UPT, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
MUFU.EX2 R88, R88
{when}LDS.128 {to}, [R9]
WARPGROUP.ARRIVE
HGMMA.64x128x16.F32 R24, {to}, gdesc[UR16].tnspB, R24, gsb0
{between}WARPGROUP.DEPBAR.LE gsb0, {left}
FMUL R24, R24, R2
@P1 BRA `(.L_x_1)
EXIT
"""


def code(to="R184", between="", left="0x0", head="", when=""):
    text = LOOP.format(to=to, between=between, left=left, head=head, when=when)
    return Code(tuple(text.strip().splitlines()), {".L_x_1": 2})


def test_weights_in_place_of_queries_are_found():
    assert code().confused() == []
    assert code("R152").confused() == ["LDS.128 R152, [R9]"]
    # Queries that are loaded for each key tile may have those registers.
    assert code("R152", head="LDSM.16.M88.4 R152, [R11]\n").confused() == []
    # What is predicated off leaves what was there before.
    kept = code("R152", head="LDSM.16.M88.4 R152, [R11]\n", when="@!P1 ").confused()
    assert kept == ["LDSM.16.M88.4 R152, [R11]"]


@pytest.mark.parametrize(
    "between",
    ["MOV R24, RZ\n", "@P0 LDS.128 R84, [R3]\n", "MOV R187, RZ\n", "FADD R3, R3, R87\n",
     "STS.128 [R3], R84\n", "HGMMA.64x64x16.F32 R184, R8, gdesc[UR4], RZ, !UPT, gsb0\n",
     "HGMMA.64x64x16.F32 R200, R24, gdesc[UR4], RZ, !UPT, gsb0\n"],
)  # fmt: skip
def test_registers_of_products_in_flight_are_watched(between):
    assert code().touched() == []
    assert code(between="MOV R188, RZ\nFADD R3, R3, R88\n").touched() == []
    assert code(between=between).touched() == [between.strip()]


def test_a_wait_that_leaves_a_group_in_flight_is_known():
    later = "HGMMA.64x128x16.F32 R200, R4, gdesc[UR4], RZ, !UPT, gsb0\n"
    assert code(between=later, left="0x1").touched() == []
    assert code(left="0x1").touched() == ["FMUL R24, R24, R2"]


@pytest.mark.parametrize("shape", ["bf16_d128_n128"])
def test_products_of_the_hopper_prefill(shape):
    (variant,) = (v for v in prefill_variants("sm_90") if v.symbol.endswith(f"sm90_{shape}"))
    found = Code(*instructions(variant, disassembler()))
    assert sum(this.is_product for this in found.code) >= 40
    assert found.touched() == []
    assert found.confused() == []
