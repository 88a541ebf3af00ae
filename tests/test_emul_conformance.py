"""The machine gives what a GPU gave: goldens of single-instruction kernels, replayed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
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


# Cases that a GPU has not decided yet.
UNDECIDED = {name for name in CASES if name.startswith(("tma_nan_fill", "tma_store_outside"))}
UNDECIDED |= {"tma_unaligned_x", "cp_async", "bulk_load", "mbarrier_phases"}
UNDECIDED |= {f"tma_store_swizzle3_{i}" for i in range(2)}
UNDECIDED |= {name for name in CASES if name.startswith(("tma_reduce", "bulk_reduce"))}
UNDECIDED |= {name for name in CASES if name.startswith("cluster_")} | {"bulk_cache_hint"}


def test_goldens_are_those_of_the_cases():
    assert set(goldens()) == set(CASES) - UNDECIDED
    assert GOLDENS.stat().st_size <= 1 << 20


@pytest.mark.parametrize("name", sorted(set(CASES) - UNDECIDED))
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
