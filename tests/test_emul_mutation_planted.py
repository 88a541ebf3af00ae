"""The machine catches bugs planted in the library's own kernels."""

from __future__ import annotations

import pytest
from emulator.planted import PLANTED
from emulator.planted_fp8 import PLANTED_FP8
from emulator.planted_fp8kv import PLANTED_FP8KV
from emulator.planted_latent import PLANTED_LATENT
from emulator.planted_mail import PLANTED_MAIL
from emulator.planted_prefill import PLANTED_PREFILL
from emulator.planted_rows import PLANTED_ROWS
from emulator.planted_shared import PLANTED_SHARED
from emulator.planted_shared_fp8 import PLANTED_SHARED_FP8
from emulator.planted_side import PLANTED_SIDE
from emulator.planted_sm80 import PLANTED_SM80
from emulator.planted_small import PLANTED_SMALL
from emulator.planted_tail import PLANTED_TAIL

# Orders of warps that each is looked for in.
SEEDS = [
    (PLANTED, 20), (PLANTED_SM80, 20), (PLANTED_SHARED, 6), (PLANTED_FP8, 20), (PLANTED_ROWS, 20),
    (PLANTED_PREFILL, 20), (PLANTED_LATENT, 8), (PLANTED_SMALL, 20), (PLANTED_MAIL, 10),
    (PLANTED_SIDE, 6), (PLANTED_SHARED_FP8, 6), (PLANTED_FP8KV, 6), (PLANTED_TAIL, 10),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "seeds"),
    [pytest.param(bug, seeds, id=bug.name) for bugs, seeds in SEEDS for bug in bugs],
)
def test_emul_catches_what_is_planted(bug, seeds):
    device = bug.device()
    caught = [bug.caught(device, seed) for seed in range(seeds)]
    if bug.pattern:
        without = bug.device()
        assert bug.caught(without, 0, on=False) is None or not without.switches
        found = sum(what is not None for what in caught)
        assert found == seeds if bug.always else found > seeds // 2
    else:
        assert caught == [None] * seeds
