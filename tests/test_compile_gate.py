"""Every kernel compiles for every architecture: no spills, no warnings, the registers there are."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import pytest
from variants_cover import pairs, pairwise_cover

from cupyflash.runtime.compile import compile_source, kernel_source
from cupyflash.runtime.prefill_tile import prefill_ones_variants
from cupyflash.runtime.variants import all_variants

GATE = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
DEEP = ["sm_87", "sm_103", "sm_110", "sm_121"]


def compiles_cleanly(variant):
    source, options = kernel_source(variant)
    _, log = compile_source(source, (*options, "--ptxas-options=-v"), variant)
    assert "warning" not in log, log
    assert "C75" not in log, log  # ptxas ignored a register bound, or serialised wgmma
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, log
    assert not any(spills), f"{variant.symbol} for {variant.arch} spills\n{log}"


@pytest.mark.parametrize("arch", GATE)
def test_a_pairwise_cover_compiles(arch):
    for variant in pairwise_cover(all_variants(arch)):
        compiles_cleanly(variant)


def test_prefills_with_a_column_of_ones_compile():
    """They are not of `all_variants`, and what 8-bit calls have without a log-sum-exp."""
    for variant in prefill_ones_variants():
        compiles_cleanly(variant)


@pytest.mark.deep
@pytest.mark.parametrize("arch", [*GATE, *DEEP])
def test_all_variants_compile(arch):
    for variant in all_variants(arch):
        compiles_cleanly(variant)


@pytest.mark.parametrize("arch", GATE)
def test_the_variants_are_few_and_distinct(arch):
    variants = all_variants(arch)
    assert max(Counter(v.arch for v in variants).values()) <= 150  # sm_90a has kernels of its own
    assert len({v.symbol for v in variants}) == len(set(variants)) == len(variants)
    for variant in variants:
        assert variant.arch in (arch, f"{arch}a")
        assert list(variant.defines) == sorted(variant.defines)
        assert dict(variant.defines)["PARAMS_NBYTES"] % 8 == 0


def test_the_cover_has_every_pair():
    variants = all_variants("sm_90")
    everything = set().union(*map(pairs, variants))
    assert set().union(*map(pairs, pairwise_cover(variants))) == everything
    assert any(len(pairs(a) ^ pairs(b)) for a, b in combinations(variants, 2))
