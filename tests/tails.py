"""Prefills whose last tiles are cut into pieces, however few their keys are."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

from hypothesis import strategies as st
from prefill import fp8_cases

from cupyflash import kept_launches, known_call
from cupyflash.runtime import call, prefill_plan
from cupyflash.runtime.prefill_tail import NO_TAIL, Tail, may_be_cut

__all__ = ["cut_tails", "even_cases"]


@contextmanager
def cut_tails(left, cut):
    """Of calls that leave splits to the plan the last ``left`` tiles are ``cut`` pieces each."""

    def choose(problem, info, tile, tiles, limit):
        asked = problem.num_splits or problem.batch_invariant
        return NO_TAIL if asked or not may_be_cut(tile) else Tail(tiles - min(left, tiles), cut)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(prefill_plan, "_choose_tail", choose))
        stack.enter_context(mock.patch.object(prefill_plan, "_planned_splits", return_value=1))
        for module, memo in (
            (call, "_layouts"), (known_call, "_known"), (kept_launches, "_recordings")
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, memo, {}))
        prefill_plan.make_prefill_plan.cache_clear()
        try:
            yield
        finally:
            prefill_plan.make_prefill_plan.cache_clear()


@st.composite
def even_cases(draw):
    """Requests of as many queries each, of head sizes up to 128; keys may be none."""
    case = draw(fp8_cases())
    q_len = draw(st.sampled_from([33, 64, 127, 128, 129, 200]))
    context = st.one_of(st.sampled_from([0, 1, 127, 128, 129, 300, 600, -5, -q_len]))
    contexts = draw(st.lists(context, min_size=1, max_size=3))
    head_dim = draw(st.sampled_from([64, 128, 16, 80, 96]))
    return case.replace(lengths=tuple((q_len, n) for n in contexts), head_dim=head_dim)
