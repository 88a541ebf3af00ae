"""One sequence's keys on several ranks: each attends to its share, and the states are merged.

    python examples/08_context_parallel.py --ranks 2       # starts its ranks itself
    mpirun -n 2 python examples/08_context_parallel.py     # or takes those of MPI (needs mpi4py)

Every rank has the same requests and KV heads, query heads of its own, and every ``ranks``-th token
of each context. Prompts and decode steps are held against one rank that has everything. On GPUs
the ranks speak NCCL, one GPU each, and ``--bench`` times decode steps, captured, beside one GPU
alone; on NumPy arrays they are processes of this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash import flash_attn_varlen_func, reshape_and_cache_flash
from cupyflash.distributed import (
    MpiCommunicator,
    NcclCommunicator,
    Sharding,
    context_parallel_attention,
    spawn,
)

BLOCK, KV_HEADS, GROUP, DIM = 16, 8, 4, 128
BENCH = ((1, 131072), (16, 131072), (1, 1048576))  # requests, keys of each
LAYERS = 16  # calls of one captured step


class Rank:
    """A rank's query heads and its share of a cache, beside the whole of both for comparison.

    Parameters
    ----------
    group : Communicator
    xp : module
        NumPy or CuPy.
    requests, room : int
        Number of requests, and the most tokens that each will have.
    """

    def __init__(self, group: Any, xp: Any, requests: int, room: int) -> None:
        self.group, self.xp, self.requests = group, xp, requests
        self.sharding = Sharding(group.size, 1, BLOCK)
        # Every rank has an equal part of each KV head's query heads.
        self.heads = KV_HEADS * (GROUP if GROUP % group.size == 0 else group.size)
        self.kind = np.float32 if xp is np else np.dtype(ml_dtypes.bfloat16)
        self.whole = self._cache(Sharding(1, 1, BLOCK), room)
        self.own = self._cache(self.sharding, room)
        self.lengths = np.zeros(requests, np.int32)
        self.rng = np.random.default_rng(0)  # the same numbers on every rank

    def _cache(self, sharding: Sharding, room: int) -> tuple[Any, np.ndarray]:
        columns = -(-sharding.max_local_length(room) // BLOCK)
        shape = (2, self.requests * columns, BLOCK, KV_HEADS, DIM)
        table = np.arange(self.requests * columns, dtype=np.int32).reshape(self.requests, columns)
        return self.xp.zeros(shape, self.kind), table

    def normal(self, *shape: int) -> Any:
        values = self.rng.standard_normal(shape, np.float32)
        return self.xp.asarray(values).astype(self.kind)

    def step(self, count: int) -> float:
        """``count`` new tokens of every request; the largest difference to one rank's answer."""
        tokens = self.requests * count
        q, k, v = (self.normal(tokens, n, DIM) for n in (self.heads, KV_HEADS, KV_HEADS))
        mine = self.heads_of(q, self.group.rank)
        context = self.lengths.copy()
        out = self.attend(mine, k, v, count, context)
        self.write(k, v, count, context)
        self.lengths += count
        right = self.alone(q, count)
        difference = out.astype(np.float32) - self.heads_of(right, self.group.rank).astype("f4")
        return float(self.xp.abs(difference).max())

    def heads_of(self, x: Any, rank: int, heads: str = "groups") -> Any:
        """Of all query heads those of a rank: a part of every KV head's group, or a block."""
        kv_heads = KV_HEADS if heads == "groups" else 1
        parts = x.reshape(len(x), kv_heads, self.group.size, -1, DIM)
        return self.xp.ascontiguousarray(parts[:, :, rank]).reshape(len(x), -1, DIM)

    def attend(self, q: Any, k: Any, v: Any, count: int, context: np.ndarray) -> Any:
        """New tokens over the context on all ranks and over themselves."""
        return context_parallel_attention(**self.attend_arguments(q, k, v, count, context))[0]

    def attend_arguments(
        self, q: Any, k: Any, v: Any, count: int, context: np.ndarray
    ) -> dict[str, Any]:
        xp, (cache, table) = self.xp, self.own
        return {
            "group": self.group, "q": q, "k": k, "v": v, "key_cache": cache[0],
            "value_cache": cache[1], "max_seqlen_q": count,
            "cu_seqlens_q": xp.arange(0, len(q) + 1, count, dtype=np.int32),
            "context_lens": xp.asarray(self.sharding.local_lengths(context, self.group.rank)),
            "max_context_len": self.sharding.max_local_length(int(context.max())),
            "block_table": xp.asarray(table),
        }  # fmt: skip

    def write(self, k: Any, v: Any, count: int, context: np.ndarray) -> None:
        """Store the new tokens: all of them in the whole cache, those of this rank in its own."""
        request = np.repeat(np.arange(self.requests), count)
        position = np.repeat(context, count) + np.tile(np.arange(count), self.requests)
        for (cache, table), sharding, rank in (
            (self.whole, Sharding(1, 1, BLOCK), 0),
            (self.own, self.sharding, self.group.rank),
        ):
            slots = self.xp.asarray(sharding.slot_mapping(rank, table, request, position))
            reshape_and_cache_flash(k, v, cache[0], cache[1], slots, "auto", 1.0, 1.0)

    def alone(self, q: Any, count: int) -> Any:
        """The same queries, all heads, over the whole cache."""
        return flash_attn_varlen_func(**self.alone_arguments(q, count))

    def alone_arguments(self, q: Any, count: int) -> dict[str, Any]:
        xp, (cache, table) = self.xp, self.whole
        return {
            "q": q, "k": cache[0], "v": cache[1], "max_seqlen_q": count, "causal": True,
            "cu_seqlens_q": xp.arange(0, len(q) + 1, count, dtype=np.int32),
            "max_seqlen_k": int(self.lengths.max()), "seqused_k": xp.asarray(self.lengths),
            "block_table": xp.asarray(table),
        }  # fmt: skip

    def fill(self, length: int) -> None:
        """Contexts of ``length`` tokens, the shares of all ranks together the whole."""
        cache, size = self.whole[0], self.group.size
        bits = np.dtype(f"u{cache.itemsize}")
        noise = self.normal(1 << 16, DIM).view(bits)
        flat = cache.view(bits).reshape(-1, DIM)
        for start in range(0, len(flat), len(noise)):
            rows = flat[start : start + len(noise)]
            rows[...] = noise[: len(rows)]
            noise = self.xp.roll(noise, 7, axis=0)
        tokens = cache.reshape(2, self.requests, -1, KV_HEADS, DIM)
        share = tokens[:, :, self.group.rank :: size]
        own = self.own[0].reshape(2, self.requests, -1, KV_HEADS, DIM)
        own[:, :, : share.shape[2]] = share
        self.lengths[:] = length


def captured(group: Any, xp: Any, call: Callable[[], Any]) -> Callable[[], float]:
    """Replays ``LAYERS`` calls in one graph: microseconds of one call."""
    stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
    xp.cuda.Device().synchronize()
    with stream, xp.cuda.using_allocator(pool.malloc):
        call()
        group.synchronize()
        stream.begin_capture()
        try:
            kept = [call() for _ in range(LAYERS)]
        finally:
            graph = stream.end_capture()

    def replay(keep: Any = (pool, kept)) -> float:
        start, stop = xp.cuda.Event(), xp.cuda.Event()
        with stream:
            # The first one gives the host time to queue the other, and lets ranks meet.
            graph.launch(stream)
            start.record()
            graph.launch(stream)
            stop.record()
            group.synchronize()
        return float(xp.cuda.get_elapsed_time(start, stop)) * 1e3 / LAYERS

    return replay


def bench(group: Any, xp: Any, say: Callable[[str], None], only: str = "") -> None:
    """Decode steps on all ranks beside one GPU with all heads and keys; times in microseconds."""
    ranks = [f"{where} {rank}" for where in ("alone", "rank") for rank in range(group.size)]
    say(f"{'requests x keys':>18}  {'queries':>17}  " + "  ".join(f"{name:>7}" for name in ranks))
    say(" " * 39 + "speed-up (slowest of both), off by, same bits twice")
    blocks = KV_HEADS % group.size == 0
    for requests, length in BENCH:
        if only not in f"{requests} x {length}":
            continue
        rank = Rank(group, xp, requests, length + BLOCK * group.size)
        rank.fill(length)
        for heads, known in (("blocks", False), ("groups", False), ("blocks", True)):
            if blocks or heads == "groups":
                say(bench_line(rank, requests, length, heads, known))


def bench_line(rank: Rank, requests: int, length: int, heads: str, known: bool) -> str:
    """One case: times of captured steps that take turns, and what the results differ by."""
    group, xp = rank.group, rank.xp
    rank.lengths[:] = length
    q, k, v = (rank.normal(requests, n, DIM) for n in (rank.heads, KV_HEADS, KV_HEADS))
    context = rank.lengths.copy()
    rank.write(k, v, 1, context)
    rank.lengths += 1
    own = rank.heads_of(q, group.rank, heads)
    arguments = {**rank.attend_arguments(own, k, v, 1, context), "heads": heads}
    if known:  # every rank has computed all queries: none are gathered
        parts = [rank.heads_of(q, other, heads) for other in range(group.size)]
        arguments["all_q"] = xp.concatenate(parts, axis=1)
    arguments["out"] = xp.empty_like(own)
    alone = {**rank.alone_arguments(q, 1), "out": xp.empty_like(q)}
    replays = {
        "all": captured(group, xp, lambda: context_parallel_attention(**arguments)[0]),
        "one": captured(group, xp, lambda: flash_attn_varlen_func(**alone)),
    }
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(9):
        for name, replay in replays.items():
            group.agree("a round", b"")  # all ranks start together
            times[name].append(replay())
        time.sleep(0.02)
    mine = xp.asarray([statistics.median(times[name][2:]) for name in ("one", "all")])
    found = [context_parallel_attention(**arguments)[0].copy() for _ in range(2)]
    right = rank.heads_of(flash_attn_varlen_func(**alone), group.rank, heads)
    off = float(xp.abs(found[0].astype(np.float32) - right.astype(np.float32)).max())
    same = found[0].tobytes() == found[1].tobytes()
    one, all_ = group.all_gather(mine).T.tolist()
    name = f"{requests} x {length}"
    queries = f"{heads}, known" if known else f"{heads}, gathered"
    columns = "  ".join(f"{us:7.1f}" for us in (*one, *all_))
    return f"{name:>18}  {queries:>17}  {columns}  {min(one) / max(all_):5.2f} x  {off:.4f}  {same}"


def run(group: Any, timed: bool, only: str = "") -> None:
    """What every rank does: ``only`` times cases with that in their names."""
    xp = np if not isinstance(group, NcclCommunicator) else __import__("cupy")

    def say(line: str) -> None:
        if group.rank == 0:
            print(line, flush=True)

    where = "NumPy arrays" if xp is np else "a GPU each"
    say(f"{group.size} ranks, {where}, {type(group).__name__}")
    rank = Rank(group, xp, requests=3, room=200)
    for count in (37, 1, 1, 5):
        what = "prompts" if count == 37 else "decode" if count == 1 else "more tokens"
        off = rank.step(count)
        say(f"{what}: {count} tokens each, {rank.lengths[0]} keys, off by {off:.1e}")
    if timed and xp is not np:
        bench(group, xp, say, only)


def gpus() -> int:
    try:
        import cupy
    except ImportError:
        return 0
    return cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="without mpirun")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--bench", action="store_true", help="time decode steps on GPUs")
    parser.add_argument("--only", default="", help="a part of a timed case's name: '1 x 131072'")
    options = parser.parse_args()
    under_mpi = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK"))
    if options.device == "auto":
        needed = 1 if under_mpi else options.ranks
        options.device = "gpu" if gpus() >= max(needed, 2) else "cpu"
    if under_mpi and options.device == "gpu":
        import cupy
        from mpi4py import MPI

        local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
        cupy.cuda.Device(local).use()
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # one replay at a time
        run(NcclCommunicator.from_mpi(timeout=30.0), options.bench, options.only)
    elif under_mpi:
        run(MpiCommunicator(), options.bench, options.only)
    elif options.device == "gpu":
        spawn(run, options.ranks, options.bench, options.only, timeout=30.0)
    else:
        from cupyflash.distributed.local import run_processes

        run_processes(run, options.ranks, options.bench, options.only)


if __name__ == "__main__":
    main()
