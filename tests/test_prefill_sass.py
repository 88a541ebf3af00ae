"""What ptxas makes of the inner loop of the Hopper prefill."""

from __future__ import annotations

import pytest
from sass import disassembler, instructions, product_loops

from cupyflash.runtime.prefill_plan import prefill_variants

VARIANTS = {variant.symbol: variant for variant in prefill_variants("sm_90")}


def numbers(variant):
    found = dict(variant.defines)
    return found["HEAD_DIM"], found["HEAD_DIM_V"], found["KEY_TILE"]


def inner_loop(variant):
    """The one that fixes the shift: it has no maximum over the scores, only over two sums."""
    keys = numbers(variant)[2]
    (loop,) = (
        loop
        for loop in product_loops(variant)
        if loop.count("FMNMX") < 8 and loop.count("MUFU.EX2") == keys // 2
    )
    return loop


@pytest.mark.parametrize(
    "shape",
    [
        "d64_n64_m256",
        "d64_n128_m192",
        "d64_n128",
        "d128_n128",
        "d192_128_n128",
        "d256_n80",
        "d256_n64",
    ],
)  # fmt: skip
def test_the_inner_loop(shape):
    variant = VARIANTS[f"attention_fwd_sm90_bf16_{shape}"]
    head_dim, _, keys = numbers(variant)
    loop = inner_loop(variant)
    assert loop.count("HGMMA") == head_dim // 16 + keys // 16
    # Descriptors come from uniform registers: a move for each of them would be twice as many.
    assert loop.count("R2UR") <= 4
    # Some exponentials run beside the warpgroup's own products, the rest beside the other one's.
    assert loop.between_waits("MUFU.EX2") >= keys // 32
    assert not any(
        "STL" in text or "LDL" in text for text in instructions(variant, disassembler())[0]
    )


def test_masked_tiles_of_modified_scores_overlap_wholly():
    variant = VARIANTS["attention_fwd_sm90_bf16_d128_n128_mod"]
    loops = [loop for loop in product_loops(variant) if loop.count("FMNMX") > 8]
    assert max(loop.between_waits("MUFU.EX2") for loop in loops) >= 64
