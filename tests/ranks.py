"""One step of context parallelism on every rank, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from batches import starts

from cupyflash import reshape_and_cache_flash
from cupyflash.distributed import Sharding, context_parallel_attention
from cupyflash.distributed.heads import gather_heads
from cupyflash.testing import DTYPES, POISON_INDEX, expect_attention, merge_baseline, round_to
from cupyflash.testing.rounding import half_ulp

SCALE = 0.2
LITERAL = ((1, 40), (3, 0), (0, 17), (1, 1), (7, 100), (1, 0))


@dataclass(frozen=True)
class Case:
    """One step; ``lengths`` are (new tokens, context tokens) of each request."""

    lengths: tuple[tuple[int, int], ...] = LITERAL
    num_kv_heads: int = 1
    group_size: int = 2
    head_dim: int = 32
    block_size: int = 16
    interleave: int = 1
    dtype: str = "fp32"
    kv_cache_dtype: str = "auto"
    causal: bool = True
    softcap: float = 0.0
    sink: bool = False
    combine: str = "auto"
    padding: int = 0  # rows of no request
    heads: str = "groups"
    all_q: bool = False  # every rank has the queries of all
    seed: int = 0

    def sharding(self, size: int) -> Sharding:
        return Sharding(size, self.interleave, self.block_size)


class Step:
    """The arrays of a case; what all ranks have alike is drawn alike."""

    def __init__(self, case: Case, size: int) -> None:
        self.case, self.size = case, size
        rng = np.random.default_rng(case.seed)
        kind, shape = DTYPES[case.dtype], (case.num_kv_heads, case.head_dim)
        self.q_lens = [q for q, _ in case.lengths]
        self.context = [n for _, n in case.lengths]
        self.keys, self.values = (
            [round_to(rng.standard_normal((q + n, *shape)), kind) for q, n in case.lengths]
            for _ in range(2)
        )
        self.scales = rng.uniform(0.5, 2, 2).astype(np.float32)
        sharding = case.sharding(size)
        columns = [-(-sharding.max_local_length(q + n) // case.block_size) for q, n in case.lengths]
        blocks = iter((1 + rng.permutation(sum(columns) + 1)).tolist())
        self.num_blocks = sum(columns) + 2
        self.table = np.full((len(columns), max(columns) + 1), POISON_INDEX, np.int32)
        for row, count in zip(self.table, columns, strict=True):
            row[:count] = [next(blocks) for _ in range(count)]

    @property
    def fp8(self) -> bool:
        return self.case.kv_cache_dtype != "auto"

    def own(self, rank: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Queries of a rank's heads, with padding rows behind, and their sinks."""
        case, rng = self.case, np.random.default_rng([self.case.seed, rank])
        heads = case.num_kv_heads * case.group_size
        q = rng.standard_normal((sum(self.q_lens) + case.padding, heads, case.head_dim))
        sinks = rng.standard_normal(heads).astype(np.float32) if case.sink else None
        return round_to(q, DTYPES[case.dtype]), sinks

    def seen_kv_heads(self, rank: int) -> slice:
        """The KV heads of a rank's query heads."""
        if self.case.heads == "groups":
            return slice(None)
        each = self.case.num_kv_heads // self.size
        return slice(rank * each, (rank + 1) * each)

    def new(self, operand: list[np.ndarray]) -> np.ndarray:
        """Keys or values of the new tokens; NaN in padding rows."""
        rows = np.concatenate([own[n:] for own, n in zip(operand, self.context, strict=True)])
        pad = ((0, self.case.padding), (0, 0), (0, 0))
        return np.pad(rows, pad, constant_values=np.nan)

    def caches(self, rank: int) -> np.ndarray:
        """A rank's share of the contexts among NaN: [2, num_blocks, block_size, Hk, D]."""
        case = self.case
        kind = np.dtype(np.uint8) if self.fp8 else DTYPES[case.dtype]
        shape = (2, self.num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
        caches = np.full(shape, 0x7F if self.fp8 else np.nan, kind)
        request = np.repeat(np.arange(len(self.context)), self.context)
        position = np.concatenate([np.arange(n) for n in self.context])
        slots = case.sharding(self.size).slot_mapping(rank, self.table, request, position)
        rows = (
            np.concatenate([own[:n] for own, n in zip(operand, self.context, strict=True)])
            for operand in (self.keys, self.values)
        )
        scales = self.scales.tolist() if self.fp8 else [1.0, 1.0]
        reshape_and_cache_flash(*rows, *caches, slots, case.kv_cache_dtype, *scales)
        return caches

    def arguments(self, rank: int) -> dict[str, Any]:
        case, sharding = self.case, self.case.sharding(self.size)
        q, sinks = self.own(rank)
        caches = self.caches(rank)
        local = sharding.local_lengths(np.array(self.context, np.int32), rank)
        args = {
            "q": q, "k": self.new(self.keys), "v": self.new(self.values),
            "key_cache": caches[0], "value_cache": caches[1],
            "cu_seqlens_q": starts(self.q_lens), "max_seqlen_q": max(self.q_lens),
            "context_lens": local,
            "max_context_len": sharding.max_local_length(max(self.context)),
            "block_table": self.table, "softmax_scale": SCALE, "causal": case.causal,
            "softcap": case.softcap, "s_aux": sinks, "combine": case.combine, "heads": case.heads,
        }  # fmt: skip
        if case.all_q:
            every = np.stack([self.own(other)[0] for other in range(self.size)])
            kv_heads = case.num_kv_heads if case.heads == "groups" else 1
            args["all_q"] = gather_heads(every, kv_heads)
        if self.fp8:
            args.update(k_descale=float(self.scales[0]), v_descale=float(self.scales[1]))
        return args

    def stored(self) -> list[list[np.ndarray]]:
        """All keys and all values of each request, contexts as the cache stores them."""
        if not self.fp8:
            return [self.keys, self.values]
        found = []
        for operand, scale in zip((self.keys, self.values), self.scales, strict=True):
            kept = []
            for own, n in zip(operand, self.context, strict=True):
                low = (own[:n].astype(np.float32) / scale).astype(DTYPES["e4m3"])
                kept.append(np.concatenate([low.astype(np.float64) * float(scale), own[n:]]))
            found.append(kept)
        return found

    def check(self, rank: int, out: np.ndarray, lse: np.ndarray) -> None:
        """Hold a rank's result against attention in one pass; padding rows against NaN."""
        rows = sum(self.q_lens)
        assert np.isnan(out[rows:].astype(np.float32)).all()
        self.expected(rank).check(out[:rows], lse[:, :rows])

    def expected(self, rank: int) -> Any:
        """The answer of one pass; the error that as many passes as ranks and one may make."""
        case, rows = self.case, sum(self.q_lens)
        q, sinks = self.own(rank)
        seen = self.seen_kv_heads(rank)
        keys, values = ([own[:, seen] for own in operand] for operand in self.stored())
        lens = [len(own) for own in keys]
        shared = {
            "softmax_scale": SCALE, "softcap": case.softcap, "cu_seqlens_q": starts(self.q_lens),
            "out_dtype": case.dtype, "p_dtype": case.dtype,
        }  # fmt: skip
        k, v = np.concatenate(keys), np.concatenate(values)
        whole = expect_attention(
            q[:rows], k, v, cu_seqlens_k=starts(lens), causal=case.causal, s_aux=sinks, **shared
        )
        parts, sharding = [], case.sharding(self.size)
        shared["out_dtype"] = "fp32"  # what rounding states costs is the floor
        for other in range(self.size):
            kept = [np.flatnonzero(sharding.owner(np.arange(n)) == other) for n in self.context]
            part = [
                np.concatenate([own[own_rows] for own, own_rows in zip(operand, kept, strict=True)])
                for operand in (keys, values)
            ]
            own_starts = starts([len(own_rows) for own_rows in kept])
            parts.append(expect_attention(q[:rows], *part, cu_seqlens_k=own_starts, **shared))
        new = [self.new(operand)[:rows, seen] for operand in (self.keys, self.values)]
        parts.append(
            expect_attention(
                q[:rows], *new, cu_seqlens_k=starts(self.q_lens), causal=case.causal, s_aux=sinks,
                **shared,
            )
        )  # fmt: skip
        low = [(part.out_baseline, part.lse_baseline) for part in parts]
        merged = merge_baseline(*low, out_dtype=np.float32)[0]
        floor = whole.out_floor + self.rounding(rank, parts, whole)
        return replace(whole, out_baseline=merged, out_floor=floor)

    def rounding(self, rank: int, parts: list[Any], whole: Any) -> float:
        """What states in the type of the queries, not in float32, cost an element at most.

        Those that are merged before the last merge become one, which is rounded as well: of two
        ranks this one's part of the context and the new tokens, else all parts of the context.
        """
        dtype = DTYPES[self.case.dtype]

        def lost(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
            return weights * half_ulp(np.abs(values), dtype)

        total = np.where(np.isinf(whole.lse), 0, whole.lse)  # with the sink
        weights = [np.exp(part.lse - total).T[..., None] for part in parts]
        most = sum(lost(part.out, own) for part, own in zip(parts, weights, strict=True))
        if self.size > 1:
            whole_context = self.size > 2 or self.case.combine == "ag_rs"
            first = range(self.size) if whole_context else (rank, self.size)
            share = sum(weights[i] for i in first)
            joined = sum(weights[i] * parts[i].out for i in first)
            most = most + lost(joined / np.where(share == 0, 1, share), share)
        return float(most.max(initial=0.0))


def run_step(group: Any, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """A rank's part of the step."""
    args = Step(case, group.size).arguments(group.rank)
    out = np.full((*args["q"].shape[:2], case.head_dim), np.nan, args["q"].dtype)
    return context_parallel_attention(group, **args, out=out)


def run_steps(group: Any, cases: list[Case]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [run_step(group, case) for case in cases]


def run_emulated(group: Any, cases: list[Case], arch: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same through the real kernels on the emulator; a process a rank."""
    from emulator import emulated

    with emulated(arch):
        return run_steps(group, cases)
