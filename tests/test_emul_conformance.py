"""The machine gives what a GPU gave: goldens of single-instruction kernels, replayed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from emulator import EmulatorError
from emulator.conformance import (
    GOLDENS,
    KEEP,
    all_cases,
    emulator_runner,
    run_case,
    summary,
)

CASES = {case.name: case for case in all_cases()}


@functools.cache
def goldens() -> dict[str, np.ndarray]:
    with np.load(GOLDENS) as stored:
        return dict(stored)


# An H200 answers these with an illegal instruction.
REFUSED = {
    "tma_unaligned_x": "not at a multiple of 16 bytes",
    "tma_store_outside_x": "negative",
    "tma_store_outside_y": "negative",
}


def test_goldens_are_those_of_the_cases():
    assert set(goldens()) == set(CASES) - set(REFUSED)
    assert GOLDENS.stat().st_size <= 1 << 20


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_emul_refuses_what_the_gpu_refused(name):
    with pytest.raises(EmulatorError, match=REFUSED[name]):
        run_case(CASES[name], emulator_runner(seed=1))


@pytest.mark.parametrize("name", sorted(set(CASES) - set(REFUSED)))
def test_emul_gives_what_the_gpu_gave(name):
    case = CASES[name]
    got = summary(run_case(case, emulator_runner(seed=1)))
    expected = goldens()[name]
    if case.compare == "exact":
        np.testing.assert_array_equal(got, expected)
        return
    dtype, rtol, atol = case.compare
    # The checksum of a result within a tolerance says nothing.
    a, b = (x[: min(x.size, KEEP)].view(dtype).astype(np.float64) for x in (got, expected))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
