"""Places virtual registers in a warp's file: liveness, then a linear scan.

NVRTC's PTX is in static single assignment form, so a kernel names thousands of registers of which
a few hundred are live at once. Sharing places keeps a warp's file in the cache.
"""

from __future__ import annotations

import heapq
from typing import Any

from .names import DEF, USE, Reg
from .program import Insn, Lowering

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


def _accesses(insn: Insn, waits: set[int], at_wait: list[Reg]) -> tuple[list[Reg], list[Reg]]:
    reads, writes = [], []
    for a in insn.args:
        if isinstance(a, tuple):
            reg, role = a
            if role & USE or (role & DEF and insn.pred is not None):
                reads.append(reg)
            if role & DEF:
                writes.append(reg)
    if insn.pred is not None:
        reads.append(insn.pred)
    if insn.op in waits:  # registers of a wgmma stay its own until it is waited for
        reads += at_wait
    return reads, writes


def assign_slots(low: Lowering) -> int:
    """Gives every register a place; returns the words of a warp's file."""
    table = low.table
    waits = {table["wgmma.wait_group.sync.aligned"][0][0]}
    at_wait = list(low.wgmma_regs)
    number: dict[int, int] = {}
    regs: list[Reg] = []
    accesses = []
    fixed = {id(r) for r in (*low.consts.values(), *low.specials.values(), *low.junk)}

    def bit(reg: Reg) -> int:
        if id(reg) not in number:
            number[id(reg)] = len(regs)
            regs.append(reg)
        return number[id(reg)]

    for insn in low.code:
        reads, writes = _accesses(insn, waits, at_wait)
        accesses.append(
            (
                [bit(r) for r in reads if id(r) not in fixed],
                [bit(r) for r in writes if id(r) not in fixed],
            )
        )
    flow = _Flow(low, table)
    first, last = _intervals(flow, accesses, len(regs))
    return _place(low, regs, first, last)


def _intervals(flow: _Flow, accesses: list[Any], count: int) -> tuple[list[int], list[int]]:
    blocks = range(len(flow.starts))
    gen, kill = [0] * len(blocks), [0] * len(blocks)
    first, last = [1 << 60] * count, [-1] * count
    for b in blocks:
        used: set[int] = set()
        written: set[int] = set()
        for i in range(flow.starts[b], flow.ends[b]):
            reads, writes = accesses[i]
            used.update(r for r in reads if r not in written)
            written.update(writes)
            for r in (*reads, *writes):  # i only grows
                if last[r] < 0:
                    first[r] = i
                last[r] = i
        gen[b], kill[b] = sum(1 << r for r in used), sum(1 << r for r in written)
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
    for b in blocks:
        for bits, at in ((live_in[b], flow.starts[b]), (live_out[b], flow.ends[b])):
            while bits:
                low_bit = bits & -bits
                r = low_bit.bit_length() - 1
                bits ^= low_bit
                first[r] = min(first[r], at)
                last[r] = max(last[r], at)
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
