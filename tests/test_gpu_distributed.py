"""Context parallelism over NCCL, one GPU a rank; needs two."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from ranks import LITERAL, Case, Step

from cupyflash.distributed import RankLostError, context_parallel_attention, spawn

pytestmark = pytest.mark.gpu
CASES = [
    Case(
        LITERAL, 2, 2, 64, 16, every, dtype, kv, softcap=cap, sink=True, combine=combine, padding=1
    )
    for every, dtype, kv, cap, combine in (
        (1, "bf16", "auto", 0.0, "a2a"),
        (4, "fp16", "auto", 5.0, "ag_rs"),
        (16, "bf16", "fp8", 0.0, "ag"),
    )
]
CASES += [Case(((1, 1), (2, 3), (1, 0)), head_dim=64, dtype="bf16", sink=True)]
CASES += [Case(((5, 0), (2, 0)), head_dim=64, dtype="bf16")]
CASES += [
    Case(LITERAL, 4, 2, 64, dtype="bf16", sink=True, heads="blocks", combine=combine, all_q=all_q)
    for combine, all_q in (("a2a", False), ("ag", True))
]


@pytest.fixture(autouse=True)
def two_gpus():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU; ranks need one each")


def on_gpu(group, case):
    """The arguments of a rank on its GPU, and a poisoned output."""
    import cupy as cp

    args = Step(case, group.size).arguments(group.rank)
    args = {n: cp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in args.items()}
    shape = (*args["q"].shape[:2], case.head_dim)
    args["out"] = cp.asarray(np.full(shape, np.nan, args["q"].dtype))
    return args


def steps(group, cases):
    """Every case twice: the bits must be the same."""
    found = []
    for case in cases:
        one, two = (
            [x.get() for x in context_parallel_attention(group, **on_gpu(group, case))]
            for _ in range(2)
        )
        assert [x.tobytes() for x in one] == [x.tobytes() for x in two]
        found.append(one)
    return found


def test_steps_over_nccl_are_one_pass():
    for case, found in zip(CASES, zip(*spawn(steps, 2, CASES), strict=True), strict=True):
        for rank, (out, lse) in enumerate(found):
            Step(case, 2).check(rank, out, lse)


def replays(group, case, other):
    """A captured step, replayed after its inputs have changed to another step's."""
    import cupy as cp

    stream, pool = cp.cuda.Stream(non_blocking=True), cp.cuda.MemoryPool()
    args, later = on_gpu(group, case), on_gpu(group, other)
    later["max_context_len"] = args["max_context_len"] = 64
    eager = [x.get() for x in context_parallel_attention(group, **later)]
    later["out"][...] = args["out"]
    with stream, cp.cuda.using_allocator(pool.malloc):
        context_parallel_attention(group, **args)
        stream.synchronize()
        stream.begin_capture()
        try:
            found = context_parallel_attention(group, **args)
        finally:
            graph = stream.end_capture()
        for name, array in args.items():
            if isinstance(array, cp.ndarray) and name != "out":
                array.view(np.uint8)[...] = later[name].view(np.uint8)
        graph.launch(stream)
        stream.synchronize()
        rows = [x.get() for x in found]
    return eager, rows


@pytest.mark.parametrize("combine", ["a2a", "ag"])
def test_a_captured_step_replays_over_nccl(combine):
    case = replace(CASES[0], lengths=((1, 40), (1, 100), (1, 7)), padding=0, combine=combine)
    for eager, rows in spawn(replays, 2, case, replace(case, seed=5)):
        assert [x.tobytes() for x in eager] == [x.tobytes() for x in rows]


def agree_behind_work(group):
    """Without NCCL's support of mixing, no collective runs beside a replay: it waits for it."""
    import cupy as cp

    hold = cp.RawKernel(
        'extern "C" __global__ void hold() { for (int i = 0; i < 40000; ++i) __nanosleep(500); }',
        "hold",
    )
    hold((1,), (1,), ())
    done = cp.cuda.get_current_stream().record()
    assert not done.done
    group.agree("a step", b"")
    return bool(done.done)


def test_ranks_agree_behind_what_is_queued():
    assert spawn(agree_behind_work, 2) == [True, True]


def another_state(group):
    group.agree("the step", bytes([group.rank]))


def late(group):
    group.timeout = 2.0  # joining may take longer
    if group.rank == 1:
        time.sleep(6)
    # What the others had sent before they gave up can reach a late rank; nothing after it does.
    for step in range(2):
        group.agree(f"step {step}", b"")


@pytest.mark.parametrize(
    ("function", "error"), [(another_state, "DisagreementError"), (late, "RankLostError")]
)
def test_ranks_that_disagree_or_do_not_come(function, error):
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        spawn(function, 2, timeout=20.0)
    errors = [outcome.error for outcome in caught.value.outcomes]
    assert all(errors)
    assert error in errors
    assert time.monotonic() - start < 60
