"""Runs a program: a launch in, a report out."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .library import library
from .loader import Program
from .report import EmulatorError, Report

__all__ = ["launch", "pack_params"]

STATS = ["uninitialised", "global_read", "global_written", "shared_read", "shared_written"]
STATS += ["local_bytes", "wavefronts", "steps", "switches", "left_arrived"]
STATS += ["remote_bytes"]


def pack_params(program: Program, args: Sequence[Any]) -> np.ndarray:
    """The parameter buffer: each argument at its declared offset."""
    offsets = program.image.param_offsets
    if len(args) != len(offsets):
        raise TypeError(f"{program.symbol} takes {len(offsets)} parameters, got {len(args)}")
    raw = np.zeros(program.param_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + max(program.param_bytes, 1)]
    ends = [*offsets[1:], program.param_bytes]
    for i, (arg, at, end) in enumerate(zip(args, offsets, ends, strict=True)):
        data = arg.tobytes() if isinstance(arg, np.ndarray | np.generic) else bytes(arg)
        declared = program.image.param_sizes[i]
        if len(data) != declared:
            raise TypeError(
                f"parameter {i} of {program.symbol} has {declared} bytes, got {len(data)}"
            )
        buffer[at : at + len(data)] = np.frombuffer(data, np.uint8)
        del end
    return buffer


def byte_bounds(array: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def launch(
    program: Program,
    grid: Sequence[int],
    block: Sequence[int],
    smem_bytes: int,
    args: Sequence[Any],
    arrays: Sequence[np.ndarray],
    *,
    seed: int = 0,
    check: bool = True,
    resident: int = 2,
    max_idle: int = 50_000_000,
    preempt: int = 3,
    smem_limit: int | None = None,
    cluster: Sequence[int] | None = None,
) -> Report:
    """Runs one launch; raises EmulatorError with a source line when the kernel does wrong.

    ``args`` are the by-value parameters as bytes-like objects; ``arrays`` are all the memory that
    the kernel may touch. ``seed`` 0 is a fixed order, any other a random one. ``resident`` CTAs run
    at once. ``preempt``: a warp is preempted before one in ``2 ** preempt`` synchronising
    instructions. ``cluster``: CTAs of a cluster, if the kernel does not say so itself.
    """
    params = pack_params(program, args)
    grid3, block3 = ([*map(int, x), 1, 1][:3] for x in (grid, block))
    declared = program.image.cluster
    cluster3 = [*map(int, cluster or declared or ()), 1, 1, 1][:3]
    if cluster and declared and tuple(cluster3) != declared:
        raise EmulatorError(f"LAUNCH: clusters of {cluster3}, the kernel declares {declared}")
    if smem_limit is not None and program.static_smem + smem_bytes > smem_limit:
        used = program.static_smem + smem_bytes
        raise EmulatorError(f"LAUNCH: {used} bytes of shared memory, the limit is {smem_limit}")
    entries = [(*byte_bounds(a), int(a.flags.writeable), i) for i, a in enumerate(arrays) if a.size]
    entries += [(*r, -1) for r in program.regions]
    entries.sort()
    regions = np.array([e[:3] for e in entries] or [(0, 0, 0)], np.uint64)
    counts = len(program.image.places)
    hits, conflicts = np.zeros(counts, np.uint64), np.zeros(counts, np.uint64)
    stats = np.zeros(16, np.uint64)
    read, written = (np.zeros(max(len(entries), 1), np.uint64) for _ in range(2))
    config = [*grid3, *block3, smem_bytes, params.ctypes.data, program.param_bytes]
    config += [regions.ctypes.data, len(entries), int(check), seed, resident, preempt, 0, max_idle]
    config += [x.ctypes.data for x in (hits, conflicts, stats, read, written)]
    config += cluster3
    packed = np.array(config, np.int64)
    error = ctypes.create_string_buffer(16384)
    start = time.thread_time()
    failed = library().emu_launch(
        program.handle, ctypes.c_void_p(packed.ctypes.data), error, len(error)
    )
    seconds = time.thread_time() - start
    if failed:
        message = program.explain(error.value.decode(errors="replace"))
        raise EmulatorError(f"{program.symbol}: {name_arrays(message, entries, arrays)}")
    totals = [np.zeros(len(arrays), np.int64) for _ in range(2)]
    for (_, _, _, i), r, w in zip(entries, read, written, strict=False):
        if i >= 0:
            totals[0][i] += int(r)
            totals[1][i] += int(w)
    return Report(
        symbol=program.symbol,
        bytes_read=totals[0].tolist(),
        bytes_written=totals[1].tolist(),
        stats=dict(zip(STATS, map(int, stats), strict=False)),
        seconds=seconds,
        program=program,
        hits=hits,
        conflict_hits=conflicts,
    )


def name_arrays(text: str, entries: list[Any], arrays: Sequence[np.ndarray]) -> str:
    """``#k`` of the machine's sorted list as the caller's number, shape and type."""
    for k in range(len(entries) - 1, -1, -1):
        i = entries[k][3]
        if f"array #{k}" in text:
            what = f"{arrays[i].dtype}{list(arrays[i].shape)}" if i >= 0 else "a module variable"
            text = text.replace(f"array #{k},", f"arrays[{i}] ({what}),")
    return text
