"""The machine catches planted bugs, and raises no alarm without one."""

from __future__ import annotations

import pytest
from emulator import EmulatedDevice
from emulator.mutants import MUTANTS, doubled, exchanged, split_sum
from emulator.toys import attend
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = range(1, 21)
CASES, DEEP_CASES = 60, 1000
KERNELS = ["fa2", "fa3", "split", "pipeline", "cluster"]
seeds = st.integers(0, 2**20)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_emul_catches(mutant):
    caught = [mutant.caught(seed) for seed in SEEDS]
    assert sum(c is not None for c in caught) >= 19


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 27
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def clean(examples):
    """Property: each clean kernel gives the right answer whatever the order, without an alarm."""
    lengths = st.integers(1, 130)

    @settings(max_examples=examples, deadline=None, database=None)
    @given(n=lengths, heads=st.integers(1, 2), causal=st.booleans(), seed=seeds)
    def fa2(n, heads, causal, seed):
        error, _ = attend(EmulatedDevice("sm_80"), "fa2.cu", n, heads, causal, seed)
        assert error < 0.02

    @settings(max_examples=examples, deadline=None, database=None)
    @given(n=lengths, heads=st.integers(1, 2), causal=st.booleans(), seed=seeds)
    def fa3(n, heads, causal, seed):
        error, _ = attend(EmulatedDevice("sm_90a"), "fa3.cu", n, heads, causal, seed)
        assert error < 0.02

    @settings(max_examples=examples, deadline=None, database=None)
    @given(tokens=st.integers(1, 1500), splits=st.integers(1, 6), seed=seeds)
    def split(tokens, splits, seed):
        assert split_sum(seed, tokens=tokens, splits=splits) == 0

    @settings(max_examples=examples, deadline=None, database=None)
    @given(tiles=st.integers(1, 12), ctas=st.integers(1, 4), seed=seeds)
    def pipeline(tiles, ctas, seed):
        assert doubled(seed, tiles=tiles, ctas=ctas) == 0

    @settings(max_examples=examples, deadline=None, database=None)
    @given(tiles=st.integers(1, 9), seed=seeds)
    def cluster(tiles, seed):
        assert exchanged(seed, tiles=tiles) == 0

    return {"fa2": fa2, "fa3": fa3, "split": split, "pipeline": pipeline, "cluster": cluster}


@pytest.mark.parametrize("kernel", KERNELS)
def test_emul_raises_no_false_alarm(kernel):
    clean(CASES)[kernel]()


@pytest.mark.deep
@pytest.mark.parametrize("kernel", KERNELS)
def test_emul_raises_no_false_alarm_deep(kernel):
    clean(DEEP_CASES)[kernel]()
