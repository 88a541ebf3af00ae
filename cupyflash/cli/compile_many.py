"""Many kernels at once, compiled by several processes: NVRTC's threads wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from cupyflash.runtime.compile import compiled_file, find_compiled
from cupyflash.runtime.errors import CompileError
from cupyflash.runtime.variant import Variant

from .terminal import progress

__all__ = ["JOBS", "compile_ahead", "each_variant"]

T = TypeVar("T")

JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_FEW = 3  # fewer are compiled before another process has loaded the compiler


def each_variant(
    work: Callable[[Variant], T], variants: Sequence[Variant], jobs: int = JOBS
) -> list[T]:
    """What ``work`` returns for each variant; it must pickle where there are several ``jobs``."""
    if jobs < 2 or len(variants) < _FEW:
        return list(progress(map(work, variants), len(variants), "compile"))
    context = multiprocessing.get_context("spawn")  # a fork would take CUDA's state along
    # An interrupt ends them without a word, unless this process goes on (as one behind nohup does).
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    on_interrupt = signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL
    pool = ProcessPoolExecutor(min(jobs, len(variants)), context, signal.signal, on_interrupt)
    queued = [pool.submit(work, variant) for variant in variants]
    results = (future.result() for future in queued)
    try:
        found = list(progress(results, len(variants), "compile"))
    except KeyboardInterrupt:  # nobody waits for what is being compiled
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(wait=False)
        raise
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return found


def compile_ahead(variants: Sequence[Variant], jobs: int = JOBS) -> int:
    """Fill the cache with those that are not in it; returns how many those were.

    One that does not compile says so when it is called.
    """
    missing = [variant for variant in variants if _is_missing(variant)]
    each_variant(_compile, missing, jobs)
    return len(missing)


def _is_missing(variant: Variant) -> bool:
    try:
        return find_compiled(variant) is None
    except CompileError:  # nothing here compiles for such a GPU
        return False


def _compile(variant: Variant) -> None:
    try:
        compiled_file(variant)
    except CompileError:
        return
