"""Attention over contexts on many ranks has the answer of one pass over all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import Case, Step, run_emulated, run_step, run_steps

from cupyflash.distributed import RankLostError, combine_states, context_parallel_attention
from cupyflash.distributed.local import run_processes, run_threads

SIZES = (1, 2, 3, 4, 8)  # as processes; threads go further
TYPES = (*(("fp32", "auto"), ("fp16", "auto"), ("bf16", "auto"), ("bf16", "fp8"), ("fp16", "fp8")),)


def check(case, size, results):
    step = Step(case, size)
    for rank, (out, lse) in enumerate(results):
        step.check(rank, out, lse)


@st.composite
def drawn(draw, size=None):
    """Any step; with blocks of heads for ``size`` ranks if that is given."""
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90)), min_size=1, max_size=4)
    )
    dtype, kv_cache_dtype = draw(st.sampled_from(TYPES))
    block_size = draw(st.sampled_from([4, 16]))
    return Case(
        tuple(lengths),
        num_kv_heads=draw(st.sampled_from([1, 2])) * (size or 1),
        group_size=draw(st.sampled_from([1, 3])),
        block_size=block_size,
        interleave=draw(st.sampled_from([1, 2, 4, block_size])),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        causal=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        sink=draw(st.booleans()),
        combine=draw(st.sampled_from(["auto", "a2a", "ag", "ag_rs"])),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 999)),
        heads="groups" if size is None else "blocks",
        all_q=draw(st.booleans()),
    )


@given(case=drawn(), size=st.sampled_from([*SIZES, 12]))
def test_any_step_on_ranks_is_one_pass(case, size):
    assume(sum(q for q, _ in case.lengths))
    check(case, size, run_threads(run_step, size, case))


@settings(max_examples=20)
@given(data=st.data(), size=st.sampled_from([1, 2, 3, 4]))
def test_ranks_with_blocks_of_heads(data, size):
    case = data.draw(drawn(size))
    assume(sum(q for q, _ in case.lengths))
    check(case, size, run_threads(run_step, size, case))


def sent_with_all_queries(group, case):
    run_step(group, case)
    return [what for what, _, _ in group.sent]


@pytest.mark.parametrize(("combine", "moved"), [("a2a", "all_to_all"), ("ag", "all_gather")])
def test_queries_that_every_rank_has_are_not_moved(combine, moved):
    case = Case(all_q=True, combine=combine)
    assert run_threads(sent_with_all_queries, 3, case) == [[moved] * 2] * 3


def with_wrong_queries(group, change):
    args = Step(Case(all_q=True), group.size).arguments(group.rank)
    context_parallel_attention(group, **change(args))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"all_q": a["q"]}, r"all_q is float32 of shape .*; q of 2 ranks is"),
        (lambda a: a | {"all_q": a["all_q"].astype(np.float16)}, "all_q is float16"),
        (lambda a: a | {"all_q_v": a["all_q"]}, "all_q_v is given without q_v"),
        (lambda a: a | {"combine": "ring"}, "use one of auto, a2a, ag, ag_rs"),
    ],
)
def test_refused_steps_send_nothing(change, words):
    with pytest.raises(RankLostError, match=words):
        run_threads(with_wrong_queries, 2, change)


def test_states_combined_by_every_way_are_one_state():
    """`combine_states` on its own, with states that lie apart."""
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((3, 5, 12, 8)).astype(np.float32)
    lses = rng.standard_normal((3, 12, 5)).astype(np.float32)
    lses[1, :, 2] = -np.inf
    outs[1, 2] = np.nan

    def combined(group, method):
        return combine_states(group, outs[group.rank], lses[group.rank], 2, method)

    for method in ("auto", "a2a", "ag", "ag_rs"):
        for rank, (out, lse) in enumerate(run_threads(combined, 3, method)):
            heads = np.arange(12).reshape(2, 3, 2)[:, rank].reshape(-1)
            weights = np.exp(lses[:, heads].astype(np.float64))
            right = np.einsum(
                "rht,rthd->thd", weights / weights.sum(0), np.nan_to_num(outs[:, :, heads])
            )
            ulp = np.finfo(np.float32).eps * np.abs(outs[np.isfinite(outs)]).max()
            assert np.abs(out - right).max() <= 8 * ulp  # three products, their sum, a division
            assert np.abs(lse - np.log(weights.sum(0))).max() <= 8 * ulp


def test_heads_that_cannot_be_dealt():
    for case, words in (
        (Case(num_kv_heads=2, heads="blocks"), "2 KV heads over 3 ranks"),
        (Case(heads="any"), "use 'groups' or 'blocks'"),
    ):
        with pytest.raises(RankLostError, match=words):
            run_threads(run_step, 3, case)


LITERAL = [
    Case(interleave=every, combine=combine, dtype=dtype, sink=True, num_kv_heads=2, padding=1)
    for every, combine, dtype in ((1, "a2a", "fp32"), (4, "ag_rs", "bf16"), (16, "a2a", "fp16"))
]
LITERAL.append(Case(interleave=2, dtype="bf16", sink=True, num_kv_heads=24, heads="blocks"))
# One token of context: every rank but one has an empty share.
LITERAL.append(Case(((1, 1), (2, 3), (1, 0)), sink=True))
LITERAL.append(Case(dtype="fp16", combine="ag", all_q=True, num_kv_heads=2))


@pytest.mark.parametrize("size", SIZES)
def test_ranks_as_processes(size):
    results = run_processes(run_steps, size, LITERAL, timeout=60.0)
    for case, found in zip(LITERAL, zip(*results, strict=True), strict=True):
        check(case, size, found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ranks_over_the_real_kernels(arch):
    """Cache writes, both passes and merges on the emulator."""
    cases = [
        Case(
            ((1, 40), (3, 0), (1, 1)), num_kv_heads=2, head_dim=64, dtype="fp16", sink=True,
            padding=1,
        ),
        Case(((2, 20), (1, 0)), head_dim=64, dtype="bf16", kv_cache_dtype="fp8", combine="ag_rs"),
        Case(((1, 20),), num_kv_heads=2, head_dim=64, dtype="bf16", heads="blocks"),
        Case(((1, 20), (2, 5)), num_kv_heads=2, head_dim=64, dtype="bf16", combine="a2a"),
    ]  # fmt: skip
    results = run_processes(run_emulated, 2, cases, arch, timeout=120.0)
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        check(case, 2, found)


@pytest.mark.parametrize("combine", ["a2a", "ag", "ag_rs"])
def test_the_same_bits_twice(combine):
    case = Case(dtype="bf16", combine=combine)
    one, two = (run_threads(run_step, 4, case) for _ in range(2))
    for (out, lse), (again, lse_again) in zip(one, two, strict=True):
        assert out.tobytes() == again.tobytes()
        assert lse.tobytes() == lse_again.tobytes()


@pytest.mark.parametrize(
    "changes", [{"causal": False}, {"seed": 1}, {"sink": False}, {"softcap": 3.0}]
)
def test_the_comparison_notices_another_step(changes):
    case = Case(sink=True)
    found = run_threads(run_step, 3, case)
    with pytest.raises(AssertionError):
        check(replace(case, **changes), 3, found)


def sent_without_context(group, case):
    run_step(group, case)
    return group.sent


def test_new_prompts_move_nothing():
    case = Case(((5, 0), (2, 0)))
    assert run_threads(sent_without_context, 4, case) == [[]] * 4


@settings(max_examples=10)
@given(size=st.sampled_from([2, 3]), seed=st.integers(0, 99))
def test_a_sink_counts_once(size, seed):
    """Without any visible weight beside it the LSE is the sink, not the sink of each rank."""
    case = Case(((1, 30),), sink=True, seed=seed)
    for rank, (_, lse) in enumerate(run_threads(run_step, size, case)):
        _, sinks = Step(case, size).own(rank)
        assert (lse[:, 0] >= sinks).all()
        right = Step(case, size).expected(rank).lse
        np.testing.assert_allclose(lse[:, 0], right[:, 0], rtol=1e-5)
