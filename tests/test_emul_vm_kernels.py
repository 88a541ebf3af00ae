"""Every kernel of the library loads on the machine: no instruction of it is unknown."""

from __future__ import annotations

import pytest
from emulator import EmulatedDevice

from cupyflash.runtime.variants import all_variants

ARCHS = ("sm_80", "sm_90")


def one_of_each(arch):
    """The first variant of each kernel source, and the last."""
    found = {}
    for variant in all_variants(arch):
        first, _ = found.setdefault(variant.source, (variant, variant))
        found[variant.source] = (first, variant)
    return sorted({v for pair in found.values() for v in pair}, key=lambda v: v.symbol)


CASES = [variant for arch in ARCHS for variant in one_of_each(arch)]


@pytest.mark.parametrize("variant", CASES, ids=lambda v: f"{v.symbol}-{v.arch}")
def test_emul_loads(variant):
    assert EmulatedDevice(variant.arch).compile(variant).image.texts
