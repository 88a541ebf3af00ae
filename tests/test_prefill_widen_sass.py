"""What ptxas makes of registers that hold queries: the Hopper prefill over 8-bit caches."""

from __future__ import annotations

import pytest
from sass import disassembler, instructions
from sass_registers import Code
from test_compile_gate import compiles_cleanly

from cupyflash.runtime.prefill_tile import prefill_fp8_cache_variants

VARIANTS = {variant.symbol: variant for variant in prefill_fp8_cache_variants()}
HELD = [name for name, variant in VARIANTS.items() if dict(variant.defines)["QUERIES_HELD"]]


def judged(variant):
    found = Code(*instructions(variant, disassembler()))
    products = [this for this in found.code if this.is_product]
    assert {"tnspB" in this.text for this in products} >= {True}
    assert found.touched() == []
    assert found.confused() == []
    return products


@pytest.mark.parametrize(
    "shape", ["bf16_e4m3_d128_n128", "fp16_e4m3_d128_n128", "bf16_e5m2_d64_n128_mod"]
)
def test_queries_and_weights_have_registers_of_their_own(shape):
    products = judged(VARIANTS[f"attention_fwd_sm90_{shape}"])
    assert {"tnspB" in this.text for this in products} == {False, True}


@pytest.mark.parametrize("shape", ["bf16_e4m3_d128_n128", "fp16_e5m2_d256_n64_mod"])
def test_variants_compile_without_spills(shape):
    compiles_cleanly(VARIANTS[f"attention_fwd_sm90_{shape}"])


@pytest.mark.deep
@pytest.mark.parametrize("name", VARIANTS)
def test_all_variants(name):
    compiles_cleanly(VARIANTS[name])
    judged(VARIANTS[name])


def test_the_variants_are_few_and_distinct():
    assert len(VARIANTS) == len(list(prefill_fp8_cache_variants())) <= 40
    assert len(HELD) == 16
