"""What the score matrix costs: attention that stores it against attention that does not.

One sequence, 32 heads of 128, no mask. Standard attention is two matrix products around a softmax,
with float32 scores. Memory is what each of the two takes from the device, inputs included; traffic
is counted from the passes over each array; times are medians. Without a GPU the same is measured
on NumPy arrays, with shorter sequences and fewer heads.

    python examples/06_standard_attention.py --json table.json --plot table.png
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("CUPY_TF32", "1")  # tensor cores for float32 products too

import numpy as np

from cupyflash import flash_attn_func, free_workspaces

DIM = 128
# Over the scores: written, read for the maximum, read and written less it and again by exp, read
# for the sum, read by the second product.
PASSES = 8
AT_ONCE = 1 << 30  # scores of one launch
GPU_CASES = ((1, 2048), (1, 8192), (1, 16384), (1, 32768), (64, 2048))
CPU_CASES = ((1, 256), (1, 1024), (2, 512))


@dataclass
class Row:
    """One length: bytes and seconds of standard attention (None = does not fit) and of ours."""

    batch: int
    length: int
    heads: int
    score_bytes: int
    standard_bytes: int | None
    flash_bytes: int
    standard_traffic: int
    flash_traffic: int
    standard_seconds: float | None
    flash_seconds: float
    largest_difference: float | None

    @property
    def speed_up(self) -> float | None:
        return self.standard_seconds and self.standard_seconds / self.flash_seconds


class Bench:
    """Inputs of one case, and the two ways to compute it.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    batch, length, heads : int
    """

    def __init__(self, xp: Any, batch: int, length: int, heads: int) -> None:
        self.xp, self.shape = xp, (batch, length, heads, DIM)
        self.kind = np.float32 if xp is np else np.float16

    def inputs(self) -> list[Any]:
        rng = self.xp.random.default_rng(0)
        return [
            rng.standard_normal(self.shape, dtype=np.float32).astype(self.kind) for _ in range(3)
        ]

    def flash(self, q: Any, k: Any, v: Any) -> Any:
        return flash_attn_func(q, k, v)

    def standard(self, q: Any, k: Any, v: Any) -> Any:
        """softmax(q k^T / sqrt(D)) v, the scores of all heads in memory at once."""
        xp, (batch, length, heads, _) = self.xp, self.shape
        q, k, v = (x.transpose(0, 2, 1, 3).astype(np.float32) for x in (q, k, v))
        scores = xp.empty((batch * heads, length, length), np.float32)
        flat = [x.reshape(batch * heads, length, DIM) for x in (q * DIM**-0.5, k, v)]
        out = xp.empty_like(flat[0])
        some = max(1, AT_ONCE // length**2)
        for start in range(0, batch * heads, some):
            part = slice(start, start + some)
            weights = scores[part]  # changed in place: nothing else grows as length ** 2
            xp.matmul(flat[0][part], flat[1][part].transpose(0, 2, 1), out=weights)
            weights -= weights.max(axis=2, keepdims=True)
            xp.exp(weights, out=weights)
            xp.matmul(weights, flat[2][part], out=out[part])
            out[part] /= weights.sum(axis=2, keepdims=True)
        back = out.reshape(batch, heads, length, DIM).transpose(0, 2, 1, 3)
        return back.astype(self.kind)

    def measure(self, compute: Callable[..., Any], repeats: int) -> tuple[int, float, Any]:
        """Bytes at the peak, median seconds, and the result on the host."""
        return (self._on_cpu if self.xp is np else self._on_gpu)(compute, repeats)

    def _on_cpu(self, compute: Callable[..., Any], repeats: int) -> tuple[int, float, Any]:
        tracemalloc.start()
        try:
            out = compute(*(inputs := self.inputs()))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            compute(*inputs)
            seconds.append(time.perf_counter() - start)
        return peak, statistics.median(seconds), out

    def _on_gpu(self, compute: Callable[..., Any], repeats: int) -> tuple[int, float, Any]:
        xp = self.xp
        free_workspaces()
        xp.get_default_memory_pool().free_all_blocks()
        pool = xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc):
            inputs = self.inputs()
            pool.free_all_blocks()
            out = compute(*inputs)
            peak = pool.total_bytes()
            calls = max(1, min(20, int(0.02 / self._elapsed(compute, inputs, 1))))
            seconds = [self._elapsed(compute, inputs, calls) for _ in range(repeats)]
            found = out.get()
            del out, inputs
        free_workspaces()
        pool.free_all_blocks()
        return peak, statistics.median(seconds), found

    def _elapsed(self, compute: Callable[..., Any], inputs: list[Any], calls: int) -> float:
        """Of one call, the mean of some that are queued together."""
        events = [self.xp.cuda.Event() for _ in range(2)]
        events[0].record()
        for _ in range(calls):
            compute(*inputs)
        events[1].record()
        events[1].synchronize()
        return float(self.xp.cuda.get_elapsed_time(*events)) / 1e3 / calls

    def row(self, repeats: int = 5) -> Row:
        batch, length, heads, _ = self.shape
        flash_bytes, flash_seconds, ours = self.measure(self.flash, repeats)
        standard_bytes, standard_seconds, difference = None, None, None
        try:
            standard_bytes, standard_seconds, theirs = self.measure(self.standard, repeats)
            difference = float(np.abs(ours.astype(np.float32) - theirs.astype(np.float32)).max())
        except MemoryError:  # CuPy's is one too
            pass
        scores = 4 * batch * heads * length**2
        operands = 4 * int(np.prod(self.shape)) * np.dtype(self.kind).itemsize
        return Row(
            batch, length, heads, scores, standard_bytes, flash_bytes, PASSES * scores + operands,
            operands, standard_seconds, flash_seconds, difference,
        )  # fmt: skip


def show(row: Row) -> str:
    size = "does not fit" if row.standard_bytes is None else f"{row.standard_bytes / 1e9:9.3f} GB"
    speed = "-" if row.speed_up is None else f"{row.speed_up:.1f} x"
    return (
        f"{row.batch:3} x {row.length:6}  standard {size:>12}  ours {row.flash_bytes / 1e9:7.3f} GB"
        f"  traffic / {row.standard_traffic / row.flash_traffic:6.0f}"
        f"  {row.flash_seconds * 1e3:9.2f} ms  {speed:>7}"
    )


def plot(rows: list[Row], path: str) -> None:
    """Memory and time over the length, for one sequence."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    single = [row for row in rows if row.batch == 1]
    lengths = [row.length for row in single]
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, name, unit in ((memory, "bytes", 1e9), (seconds, "seconds", 1e-3)):
        for label, kind in (("standard attention", "standard"), ("cupyflash", "flash")):
            values = [getattr(row, f"{kind}_{name}") for row in single]
            axes.plot(lengths, [v and v / unit for v in values], "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    memory.set_ylabel("GB, inputs included")
    seconds.set_ylabel("ms")
    memory.legend()
    heads = single[0].heads
    figure.suptitle(f"one sequence, {heads} heads of {DIM}, no mask")
    figure.savefig(path, dpi=120)


def array_module() -> Any:
    """CuPy where it has a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the rows there")
    parser.add_argument("--plot", help="write a picture there (needs matplotlib)")
    options = parser.parse_args(arguments)
    xp = array_module()
    cases, heads = (CPU_CASES, 4) if xp is np else (GPU_CASES, 32)
    rows = []
    for batch, length in cases:
        rows.append(Bench(xp, batch, length, heads).row())
        print(show(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    if options.plot:
        plot(rows, options.plot)
    return rows


if __name__ == "__main__":
    main()
