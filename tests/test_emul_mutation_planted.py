"""The machine catches bugs planted in the library's own kernels."""

from __future__ import annotations

import pytest
from emulator.planted import PLANTED
from emulator.planted_fp8 import PLANTED_FP8
from emulator.planted_latent import PLANTED_LATENT
from emulator.planted_prefill import PLANTED_PREFILL
from emulator.planted_rows import PLANTED_ROWS
from emulator.planted_shared import PLANTED_SHARED
from emulator.planted_sm80 import PLANTED_SM80

SEEDS = range(20)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_the_hopper_kernels(bug):
    check(bug)


@pytest.mark.parametrize("bug", PLANTED_SM80, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_the_portable_kernels(bug):
    check(bug)


@pytest.mark.parametrize("bug", PLANTED_SHARED, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_the_kernels_of_shared_prefixes(bug):
    check(bug, range(6))


@pytest.mark.parametrize("bug", PLANTED_FP8, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_the_8_bit_prefill(bug):
    check(bug)


@pytest.mark.parametrize("bug", PLANTED_ROWS, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_merges_and_writes(bug):
    check(bug)


@pytest.mark.parametrize("bug", PLANTED_PREFILL, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_between_the_warps_of_the_prefill(bug):
    check(bug)


@pytest.mark.parametrize("bug", PLANTED_LATENT, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_latent_attention(bug):
    check(bug, SEEDS[:8])


def check(bug, seeds=SEEDS):
    device = bug.device()
    caught = [bug.caught(device, seed) for seed in seeds]
    if bug.pattern:
        assert sum(found is not None for found in caught) == len(seeds)
    else:
        assert caught == [None] * len(seeds)
