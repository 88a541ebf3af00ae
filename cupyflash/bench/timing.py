"""Timing on one GPU: graph replays, inputs rotated past the L2, providers taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["Prepared", "calls_a_replay", "host_seconds", "interleave", "prepare", "seconds_of"]

_TARGET_SECONDS = 2e-3  # GPU work a replay holds, so that its own launch does not count
_HOLD_SLEEPS = 200  # of about half a microsecond
_PAUSE_SECONDS = 0.04  # rest between turns: a burst and the steady state differ by up to 15 %


@dataclass(frozen=True, slots=True)
class Prepared:
    """Something to time: ``run`` queues ``count`` calls on the null stream.

    ``calls`` are kept, because a graph refers to the memory that their closures own.
    """

    run: Callable[[], Any]
    count: int
    calls: Sequence[Callable[[], Any]]


@cache
def _hold() -> Any:
    import cupy as cp

    text = (
        'extern "C" __global__ void hold(int n) { for (int i = 0; i < n; ++i) __nanosleep(500); }'
    )
    return cp.RawKernel(text, "hold")


def _elapsed(run: Callable[[], Any]) -> float:
    """The GPU is held until everything is queued: a graph takes the host some 30 microseconds."""
    import cupy as cp

    start, stop = cp.cuda.Event(), cp.cuda.Event()
    _hold()((1,), (1,), (_HOLD_SLEEPS,))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(cp.cuda.get_elapsed_time(start, stop)) / 1e3


def prepare(
    calls: Sequence[Callable[[], Any]], target_seconds: float = _TARGET_SECONDS
) -> Prepared:
    """A CUDA graph of the calls, one per set of inputs, repeated to about ``target_seconds``."""
    import cupy as cp

    for call in calls:
        call()
    cp.cuda.get_current_stream().synchronize()
    count = calls_a_replay(calls, target_seconds)

    def queue() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        try:
            queue()
        finally:
            graph = stream.end_capture()
    return Prepared(lambda: graph.launch(cp.cuda.Stream.null), count, calls)


def calls_a_replay(
    calls: Sequence[Callable[[], Any]], target_seconds: float = _TARGET_SECONDS
) -> int:
    """How many calls make up about ``target_seconds``; each set of inputs equally often."""
    once = max(_elapsed(calls[0]), 2e-6)
    count = max(len(calls), min(200, int(target_seconds / once)))
    return -(-count // len(calls)) * len(calls)


def interleave(
    prepared: Mapping[str, Prepared], rounds: int = 7, pause_seconds: float = _PAUSE_SECONDS
) -> dict[str, float]:
    """Median GPU seconds of one call for each provider; they take turns, order alternating."""
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    for round_ in range(rounds + 1):
        for name in list(prepared)[:: 1 if round_ % 2 else -1]:
            time.sleep(pause_seconds)
            elapsed = _elapsed(prepared[name].run) / prepared[name].count
            if round_:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def seconds_of(call: Callable[[], Any], repeats: int = 9) -> float:
    """Median GPU seconds of one call, timed by events after a warm-up."""
    call()
    return statistics.median(_elapsed(call) for _ in range(repeats))


def host_seconds(call: Callable[[], Any], repeats: int = 200) -> float:
    """Median host seconds to queue one warm call."""
    import cupy as cp

    call()
    cp.cuda.get_current_stream().synchronize()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
        if len(found) % 20 == 0:
            cp.cuda.get_current_stream().synchronize()
    return statistics.median(found)
