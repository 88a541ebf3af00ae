"""Kernels with one planted bug each, and whether a run catches it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .device import EmulatedDevice, device_array
from .report import EmulatorError
from .toys import attend, load, pointer

__all__ = ["MUTANTS", "Mutant", "doubled", "exchanged", "split_sum"]

SM80, SM90 = EmulatedDevice("sm_80"), EmulatedDevice("sm_90a")
PAGE, DIM = 16, 32
MAP_NORESERVE = 0x4000  # Linux; mmap names it from Python 3.13 on
SPLIT_PARAMS = np.dtype(
    [(n, "<u8") for n in ("pool", "table", "partial", "out", "counter")]
    + [("page_stride", "<i8"), ("tokens", "<i4"), ("per_split", "<i4")]
)


def split_sum(
    seed: int, bug: int = 0, tokens: int = 1100, splits: int = 3, far: bool = False
) -> float:
    """The largest error of two launches of split.cu on the same counter."""
    pages = -(-tokens // PAGE)
    rng = np.random.default_rng(tokens)
    table = device_array(pages, np.int32, rng.permutation(pages).astype(np.int32))
    stride = PAGE * DIM
    if far:  # pages so far apart that their offsets need 64 bits; untouched memory costs nothing
        stride = 1 << 27
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        arena = np.frombuffer(mmap.mmap(-1, pages * stride * 4, flags=flags), np.float32)
    else:
        arena = device_array(pages * stride, np.float32)
    values = rng.integers(-8, 8, (pages * PAGE, DIM)).astype(np.float32)
    values[tokens:] = np.nan
    for i, page in enumerate(table.tolist()):
        arena[page * stride : page * stride + PAGE * DIM] = values[
            i * PAGE : i * PAGE + PAGE
        ].ravel()
    out, counter = device_array(DIM, np.float32), device_array(1, np.uint32, 0)
    partial = device_array((splits, DIM), np.float32)
    params = np.zeros((), SPLIT_PARAMS)
    arrays = [arena, table, partial, out, counter]
    for name, array in zip(SPLIT_PARAMS.names, arrays, strict=False):
        params[name] = array.ctypes.data
    per_split = -(-tokens // splits)
    params["page_stride"], params["tokens"] = stride, tokens
    params["per_split"] = -(-per_split // PAGE) * PAGE
    program = load("split.cu", "sm_80", "split_sum", (f"BUG={bug}",))
    error = 0.0
    for launch in range(2):
        out[...] = np.nan
        SM80.run(program, (splits,), (128,), 128, [params], arrays, seed=seed + launch * bool(seed))
        wrong = np.abs(out - values[:tokens].sum(0))
        error = max(error, float(np.nan_to_num(wrong, nan=np.inf).max()))
    return error


def doubled(seed: int, bug: int = 0, tiles: int = 11, ctas: int = 2) -> float:
    """The largest error of pipeline.cu."""
    data = device_array(tiles * 512, np.float32, np.arange(tiles * 512, dtype=np.float32))
    out = device_array(tiles * 512, np.float32)
    program = load("pipeline.cu", "sm_90a", "doubled", (f"BUG={bug}",))
    args = [pointer(data), pointer(out), np.int32(tiles)]
    SM90.run(program, (ctas,), (160,), 3 * 2048 + 32, args, [data, out], seed=seed)
    return float(np.nan_to_num(np.abs(out - 2 * data), nan=np.inf).max())


def exchanged(seed: int, bug: int = 0, tiles: int = 5) -> float:
    """The largest error of cluster.cu."""
    ranks, floats = 4, 128
    data = device_array((tiles, floats), np.float32, np.arange(tiles * floats).reshape(tiles, -1))
    out = device_array((4, ranks, floats), np.float32, 0.0)
    program = load("cluster.cu", "sm_90a", "exchange", (f"BUG={bug}",))
    args = [pointer(data), pointer(out), np.int32(tiles)]
    SM90.run(program, (ranks,), (floats,), 0, args, [data, out], seed=seed)
    mine = data.sum(0) * (np.arange(ranks)[:, None] + 1)
    expected = np.zeros_like(out)
    expected[0, 0] = expected[1] = mine.sum(0)
    expected[2] = np.roll(mine, 1, 0)
    expected[3] = expected[2] + np.arange(floats)
    return float(np.nan_to_num(np.abs(out - expected), nan=np.inf).max())


@dataclass(frozen=True)
class Mutant:
    """``run(seed)`` gives the error of the output; more than ``tolerance`` counts as caught."""

    name: str
    run: Callable[[int], float]
    tolerance: float

    def caught(self, seed: int) -> str | None:
        """What gave the bug away: the machine's message, or the wrong output; None if nothing."""
        try:
            error = self.run(seed)
        except EmulatorError as e:
            return str(e)
        return f"wrong output: {error}" if error > self.tolerance else None


FA2 = ["no barrier after the first cp.async wait", "no predicate on loads"]
FA2 += ["cp.async.wait_group off by one", "no barrier before a stage is overwritten"]
FA2 += ["divergent barrier", "no predicate on stores"]
FA3 = ["accumulator read before the wgmma wait", "stage released before the wgmma wait"]
FA3 += ["wrong parity on the empty barrier", "no wgmma.fence", "expect_tx too small"]
FA3 += ["no wait on the full barrier", "no barrier after mbarrier.init"]
FA3 += ["wrong swizzle in a descriptor", "wrong stride in a descriptor", "tail not masked"]
SPLIT = [
    "tail not masked",
    "off by one page",
    "read past the page table",
    "no __syncwarp after writes",
]
SPLIT += [
    "32-bit offset into a far pool",
    "misaligned vector load",
    "no __syncwarp before overwriting",
]
SPLIT += ["no barrier before a reduction", "two CTAs share a slot", "no fence before the counter"]
SPLIT += [
    "no fence after the counter",
    "one warp misses a barrier",
    "merge reads one partial too many",
]
SPLIT += ["ld.global.nc of written memory", "divergent shuffle", "shared memory overrun"]
SPLIT += ["counter not reset for the next launch"]
PIPELINE = ["over-arrival", "mbarrier initialised twice", "no fence after mbarrier.init"]
PIPELINE += ["expect_tx too large", "expect_tx too small", "copy completes on the wrong mbarrier"]
PIPELINE += ["load in flight at exit", "phase never flips", "stage released before it is read"]
PIPELINE += [
    "store source overwritten in flight",
    "barrier count mismatch",
    "no barrier after wait_group.read",
]
PIPELINE += ["no proxy fence", "stored before all have written", "misaligned bulk store"]
PIPELINE += ["exit before the store has read", "barrier that a warp never reaches"]


CLUSTER = ["no fence after mbarrier.init", "no barrier of the cluster before remote accesses"]
CLUSTER += ["relaxed barrier before reads", "remote arrival at CTA scope", "wait at CTA scope"]
CLUSTER += ["stored to the wrong rank", "stage refilled before all have read it"]
CLUSTER += ["multicast leaves one out", "expect_tx too small", "no proxy fence before a copy"]
CLUSTER += ["exit before others have read", "no barrier before remote reads"]
CLUSTER += ["source of a copy overwritten in flight"]


def _attention(file: str, bug: int) -> Callable[[int], float]:
    device = SM80 if file == "fa2.cu" else SM90
    return lambda seed: attend(device, file, 200, 1, True, seed, (f"BUG={bug}",))[0]


def _split(bug: int) -> Callable[[int], float]:
    return lambda seed: split_sum(seed, bug, far=bug == 5, tokens={5: 300, 7: 3100}.get(bug, 1100))


def _pipeline(bug: int) -> Callable[[int], float]:
    return lambda seed: doubled(seed, bug)


def _cluster(bug: int) -> Callable[[int], float]:
    return lambda seed: exchanged(seed, bug)


MUTANTS = [Mutant(f"fa2: {n}", _attention("fa2.cu", i), 0.02) for i, n in enumerate(FA2, 1)]
MUTANTS += [Mutant(f"fa3: {n}", _attention("fa3.cu", i), 0.02) for i, n in enumerate(FA3, 1)]
MUTANTS += [Mutant(f"split: {n}", _split(i), 0.0) for i, n in enumerate(SPLIT, 1)]
MUTANTS += [Mutant(f"pipeline: {n}", _pipeline(i), 0.0) for i, n in enumerate(PIPELINE, 1)]
MUTANTS += [Mutant(f"cluster: {n}", _cluster(i), 0.0) for i, n in enumerate(CLUSTER, 1)]
