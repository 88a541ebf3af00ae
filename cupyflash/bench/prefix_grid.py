"""When reading a shared prefix once pays: plain decode beside it, on a grid of batches.

``python -m cupyflash.bench.prefix_grid grid.json`` times it on this GPU. ``prefix_table`` makes of
that what docs/results/ has: the table of decisions, the model's numbers, the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash.runtime.workspace import free_workspaces

from .case import BenchCase
from .inputs import BenchInputs
from .kernels import needed_kernels
from .providers import cupyflash
from .timing import interleave, prepare

__all__ = ["GRID", "GRID_8_BIT", "grid_cases", "main", "measure"]

Point = tuple[int, int, int]

GRID: tuple[Point, ...] = (
    *((1, 1024, 16), (1, 32768, 4096)),
    *((2, 128, 16), (2, 1024, 1024), (2, 8192, 16), (2, 8192, 1024), (2, 32768, 16)),
    *((2, 32768, 4096), (4, 128, 1024), (4, 1024, 16), (4, 1024, 4096), (4, 4096, 16)),
    *((4, 8192, 16), (4, 8192, 1024), (4, 32768, 16), (4, 32768, 1024), (8, 128, 16)),
    *((8, 1024, 16), (8, 1024, 1024), (8, 2048, 512), (8, 4096, 256), (8, 8192, 16)),
    *((8, 8192, 4096), (8, 32768, 1024), (16, 128, 1024), (16, 1024, 16), (16, 1024, 1024)),
    *((16, 2048, 256), (16, 2048, 2048), (16, 8192, 1024), (16, 8192, 4096), (16, 32768, 16)),
    *((32, 128, 16), (32, 128, 1024), (32, 512, 16), (32, 1024, 16), (32, 1024, 1024)),
    *((32, 1024, 4096), (32, 8192, 16), (32, 8192, 1024), (64, 128, 16), (64, 128, 1024)),
    *((64, 512, 256), (64, 1024, 16), (64, 1024, 1024), (64, 1024, 4096), (64, 2048, 2048)),
    *((64, 8192, 1024), (64, 32768, 16), (128, 128, 16), (128, 128, 1024), (128, 512, 512)),
    *((128, 1024, 16), (128, 1024, 1024), (128, 2048, 2048), (128, 8192, 16), (128, 8192, 1024)),
    *((256, 128, 16), (256, 128, 1024), (256, 512, 512), (256, 1024, 16), (256, 1024, 1024)),
    *((256, 1024, 4096), (256, 8192, 1024), (256, 32768, 16), (512, 128, 16), (512, 128, 1024)),
    *((512, 1024, 16), (512, 1024, 1024), (512, 1024, 2048), (512, 1024, 4096), (512, 8192, 16)),
    (512, 8192, 1024),
)
"""Requests, keys that all of them share, own keys of each: to 512, 32768 and 4096."""

GRID_8_BIT: tuple[Point, ...] = (
    *((2, 8192, 16), (2, 32768, 1024), (4, 1024, 1024), (4, 8192, 16), (4, 32768, 16)),
    *((8, 1024, 16), (8, 2048, 512), (8, 8192, 16), (8, 8192, 4096), (8, 32768, 1024)),
    *((16, 1024, 1024), (16, 2048, 256), (16, 8192, 1024), (16, 32768, 128), (32, 128, 1024)),
    *((32, 1024, 16), (32, 1024, 1024), (32, 8192, 1024), (64, 128, 16), (64, 1024, 16)),
    *((64, 1024, 1024), (64, 1024, 4096), (64, 8192, 256), (128, 1024, 16), (128, 1024, 1024)),
    *((128, 2048, 2048), (256, 128, 16), (256, 1024, 1024), (256, 4096, 512), (512, 128, 1024)),
    *((512, 1024, 16), (512, 1024, 1024), (512, 8192, 1024)),
)

_FAR = 1.3e8  # bytes that copies of the inputs take together, so that the L2 holds few of them
_MOST_COPIES = 16
_REPLAY_SECONDS, _PAUSE_SECONDS, _ROUNDS = 1e-3, 3e-3, 7
_PART = 1 << 25  # elements of random data, which a cache repeats


def grid_cases(point: Point, cache_type: str = "bf16") -> dict[str, BenchCase]:
    """Plain decode, and each shared key read once: the schedule made ahead, or by every call."""
    requests, shared, own = point
    ahead = BenchCase(
        f"{cache_type}/b{requests}/p{shared}+s{own}",
        q_lens=(1,) * requests,
        k_lens=(shared + own,) * requests,
        kv_type=cache_type,
        prefix_levels=((shared, requests),),
    )
    return {"plain": ahead, "ahead": ahead, "inside": replace(ahead, scheduled=False)}


class _Pool:
    """Random caches of both types, made once: a point's are the next part of them."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._next = nbytes, 0
        self._memory: dict[str, Any] = {}

    def take(self, shape: tuple[int, ...], kind: str, make: Any) -> Any:
        if kind not in self._memory:
            self._memory[kind] = _repeated(make((_PART,), kind), self._nbytes)
        memory, count = self._memory[kind], int(np.prod(shape))
        start = self._next if self._next + count <= memory.size else 0
        self._next = start + count
        return memory[start : start + count].reshape(shape)


def _repeated(part: Any, nbytes: int) -> Any:
    import cupy as cp

    memory = cp.empty(nbytes // part.itemsize, part.dtype)
    for start in range(0, memory.size, part.size):
        memory[start : start + part.size] = part[: memory.size - start]
    return memory


class _GridInputs(BenchInputs):
    def __init__(self, case: BenchCase, seed: int, pool: _Pool) -> None:
        self._pool = pool
        super().__init__(case, seed)

    def _normal(self, shape: tuple[int, ...], kind: str) -> Any:
        make = super()._normal
        return self._pool.take(shape, kind, make) if len(shape) == 4 else make(shape, kind)


def _calls(cases: dict[str, BenchCase], inputs: BenchInputs) -> dict[str, Any]:
    """A callable a way of computing it, all of the same inputs."""
    found = {}
    for name, case in cases.items():
        inputs.case = replace(case, prefix_levels=()) if name == "plain" else case
        found[name] = cupyflash(inputs)
    return found


def _time(cases: dict[str, BenchCase], pool: _Pool) -> dict[str, Any]:
    import cupy as cp

    ahead = cases["ahead"]
    copies = max(1, min(_MOST_COPIES, int(_FAR / ahead.bytes_moved) + 1))
    inputs = [_GridInputs(ahead, seed, pool) for seed in range(copies)]
    calls = [_calls(cases, one) for one in inputs]
    outs = {}
    for name, call in calls[0].items():
        call()
        outs[name] = inputs[0].out.astype(np.float32)
    differ = max(float(cp.abs(outs["plain"] - outs[name]).max()) for name in ("ahead", "inside"))
    prepared = {name: prepare([one[name] for one in calls], _REPLAY_SECONDS) for name in cases}
    found = interleave(prepared, _ROUNDS, _PAUSE_SECONDS)
    prepared.clear()
    free_workspaces()  # each graph was captured on a stream of its own
    return {"us": {name: seconds * 1e6 for name, seconds in found.items()}, "differ": differ}


def measure(seconds: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Time the grids; yields a row as soon as it is done, and ends early after so many seconds.

    Yields
    ------
    dict
        ``cache``, ``requests``, ``shared``, ``own``, ``us`` of the three ways, and ``differ``: the
        largest difference of a result from plain decode's.
    """
    end = time.monotonic() + seconds
    points = [("bf16", point) for point in GRID] + [("e4m3", point) for point in GRID_8_BIT]
    kept = [grid_cases(point, kind)["ahead"] for kind, point in points]
    pool = _Pool(2 * max(case.bytes_moved for case in kept))
    # What there is no time for is spread over the grid.
    for kind, point in [*points[::2], *points[1::2]]:
        if time.monotonic() > end:
            return
        requests, shared, own = point
        row = {"cache": kind, "requests": requests, "shared": shared, "own": own}
        yield {**row, **_time(grid_cases(point, kind), pool)}


def _kernels() -> list[Any]:
    import cupy as cp

    from cupyflash.runtime.device import device_for

    cases: list[BenchCase] = []
    for kind, grid in (("bf16", GRID), ("e4m3", GRID_8_BIT)):
        for point in grid:
            found = grid_cases(point, kind)
            cases += [replace(found["plain"], prefix_levels=()), found["ahead"], found["inside"]]
    return needed_kernels(cases, device_for(cp.empty(1)).info)


def main(arguments: list[str] | None = None) -> None:
    """Compile what is needed, time the grids and write them."""
    from cupyflash.cli.compile_many import JOBS, compile_ahead

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as many")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes that compile")
    given = parser.parse_args(arguments)
    compile_ahead(_kernels(), given.jobs)
    rows = []
    for row in measure(given.seconds):
        rows.append(row)
        given.json.write_text(json.dumps(rows) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
