"""The machine catches bugs planted in the library's own Hopper kernels."""

from __future__ import annotations

import pytest
from emulator.planted import PLANTED

SEEDS = range(20)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda b: b.name)
def test_emul_catches_what_is_planted_in_the_hopper_kernels(bug):
    device = bug.device()
    caught = [bug.caught(device, seed) for seed in SEEDS]
    if bug.pattern:
        assert sum(found is not None for found in caught) == len(SEEDS)
    else:
        assert caught == [None] * len(SEEDS)
