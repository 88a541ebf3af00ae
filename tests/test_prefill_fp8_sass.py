"""What ptxas makes of the inner loop of the 8-bit Hopper prefill."""

from __future__ import annotations

import pytest
from sass import disassembler, instructions, product_loops
from sass_registers import Code

from cupyflash.runtime.variants import every_variant

VARIANTS = {variant.symbol: variant for variant in every_variant("sm_90")}


def inner_loop(variant, keys):
    """The one without masks, which are instructions a score."""
    loops = [loop for loop in product_loops(variant) if loop.count("MUFU.EX2") >= keys // 2]
    return min(loops, key=lambda loop: len(loop.body))


@pytest.mark.parametrize("ones", ["", "_ones"])
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 128), (128, 128)])
def test_the_inner_loop(head_dim, keys, ones):
    variant = VARIANTS[f"attention_fwd_sm90_fp8_d{head_dim}_n{keys}{ones}"]
    loop = inner_loop(variant, keys)
    assert loop.count("QGMMA") == head_dim // 32 + keys // 32
    # Descriptors come from uniform registers: a move for each of them would be twice as many.
    assert loop.count("R2UR") <= 4
    # The largest score is looked for beside the warpgroup's own products, three in an instruction;
    # the exponentials after them hide the sums of their output, and P as it is rounded.
    assert loop.between_waits("VIMNMX3") >= keys // 4
    assert loop.count("FMUL") == 0
    if ones:
        assert loop.count("FADD") <= 4
    else:  # multiply-adds are among the exponentials, not in front of all of them
        assert loop.before("FFMA", "MUFU.EX2", 8) <= 72
    assert not any(
        "STL" in text or "LDL" in text for text in instructions(variant, disassembler())[0]
    )


def test_one_thing_after_the_other():
    variant = VARIANTS["attention_fwd_sm90_fp8_d256_n128"]
    loop = inner_loop(variant, 128)
    assert loop.count("QGMMA") == 256 // 32 + 4 * 128 // 32
    assert not any(
        "STL" in text or "LDL" in text for text in instructions(variant, disassembler())[0]
    )


@pytest.mark.parametrize("shape", ["d128_n128", "d128_n128_ones", "d256_n128"])
def test_no_instruction_touches_registers_of_products_in_flight(shape):
    found = Code(*instructions(VARIANTS[f"attention_fwd_sm90_fp8_{shape}"], disassembler()))
    assert sum(this.base == "QGMMA" for this in found.code) >= 40
    assert found.touched() == []
