"""Places virtual registers in a warp's file: liveness, then a linear scan.

NVRTC's PTX is in static single assignment form, so a kernel names thousands of registers of which
a few hundred are live at once. Sharing places keeps a warp's file in the cache.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from .names import DEF, USE, Reg
from .program import Lowering

__all__ = ["assign_slots"]


class _Flow:
    """Blocks, and what each reads before it writes, and writes."""

    def __init__(self, low: Lowering, table: dict[str, Any]) -> None:
        code = low.code
        returns = {table["ret"][0][0]}
        leaders = {0}
        for i, insn in enumerate(code):
            if insn.targets or insn.op in returns:
                leaders.add(i + 1)
                leaders.update(insn.args[k] for k, _ in insn.targets)
        starts = sorted(x for x in leaders if x < len(code))
        self.starts, self.ends = starts, [*starts[1:], len(code)]
        index = {start: b for b, start in enumerate(starts)}
        self.successors: list[list[int]] = []
        for b, end in enumerate(self.ends):
            last = code[end - 1]
            next_blocks = [index[last.args[k]] for k, _ in last.targets if last.args[k] in index]
            ends_here = (last.op in returns or last.targets) and last.pred is None
            # brx.idx and unconditional branches do not fall through.
            if not ends_here and b + 1 < len(starts):
                next_blocks.append(b + 1)
            self.successors.append(next_blocks)


def assign_slots(low: Lowering) -> int:
    """Gives every register a place; returns the words of a warp's file."""
    table = low.table
    wait = table["wgmma.wait_group.sync.aligned"][0][0]
    regs: list[Reg] = []

    def number(reg: Reg) -> int:
        reg.number = len(regs)
        regs.append(reg)
        return reg.number

    accesses = []
    for insn in low.code:
        reads: list[int] = []
        results: list[Reg] = []
        guarded = insn.pred is not None
        for a in insn.args:
            if type(a) is not tuple or (reg := a[0]).fixed:
                continue
            if a[1] & USE or guarded:
                reads.append(reg.number if reg.number >= 0 else number(reg))
            if a[1] & DEF:
                results.append(reg)
        if (guard := insn.pred) is not None and not guard.fixed:
            reads.append(guard.number if guard.number >= 0 else number(guard))
        if insn.op == wait:  # registers of a wgmma stay its own until it is waited for
            reads += [r.number if r.number >= 0 else number(r) for r in low.wgmma_regs]
        writes = [r.number if r.number >= 0 else number(r) for r in results]
        accesses.append((reads, writes))
    first, last = _intervals(_Flow(low, table), accesses, len(regs))
    return _place(low, regs, first, last)


def _numbers(bits: int) -> list[int]:
    """Which bits are set."""
    raw = np.frombuffer(bits.to_bytes(bits.bit_length() // 8 + 1, "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
    return found


def _intervals(flow: _Flow, accesses: list[Any], count: int) -> tuple[list[int], list[int]]:
    blocks = range(len(flow.starts))
    gen, kill = [0] * len(blocks), [0] * len(blocks)
    first, last = [1 << 60] * count, [-1] * count
    for b in blocks:
        used: set[int] = set()
        written: set[int] = set()
        for i in range(flow.starts[b], flow.ends[b]):
            reads, writes = accesses[i]
            for r in reads:
                last[r] = i
                if r not in written:
                    used.add(r)
            for r in writes:
                last[r] = i
                written.add(r)
        gen[b], kill[b] = sum(1 << r for r in used), sum(1 << r for r in written)
    for i in range(len(accesses) - 1, -1, -1):
        reads, writes = accesses[i]
        for r in reads:
            first[r] = i
        for r in writes:
            first[r] = i
    live_in = list(gen)
    live_out = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for b in reversed(blocks):
            out = 0
            for s in flow.successors[b]:
                out |= live_in[s]
            live_out[b] = out
            new = gen[b] | (out & ~kill[b])
            if new != live_in[b]:
                live_in[b] = new
                changed = True
    seen = 0
    for b in blocks:  # what is live at the start of a block, in the first such block
        for r in _numbers(live_in[b] & ~seen):
            first[r] = min(first[r], flow.starts[b])
        seen |= live_in[b]
    seen = 0
    for b in reversed(blocks):  # and at its end, in the last
        for r in _numbers(live_out[b] & ~seen):
            last[r] = max(last[r], flow.ends[b])
        seen |= live_out[b]
    return first, last


def _place(low: Lowering, regs: list[Reg], first: list[int], last: list[int]) -> int:
    """Predicates at the front, one word each; then 64-bit places, then 32-bit ones."""
    at = 0
    fixed = [*low.consts.values(), *low.specials.values(), *low.junk]
    for width in (0, 2, 1):
        size = (1, 32, 64)[width]
        at = -(-at // 64) * 64
        for reg in fixed:
            if reg.width == width:
                reg.slot = at
                at += size
        order = sorted((i for i, r in enumerate(regs) if r.width == width), key=lambda i: first[i])
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        for i in order:
            # A place is free for an instruction after the last one that reads it: an instruction
            # may write its first result before it reads its last operand.
            while busy and busy[0][0] < first[i]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                regs[i].slot = heapq.heappop(free)
            else:
                regs[i].slot = at
                at += size
            heapq.heappush(busy, (last[i], regs[i].slot))
    return at
