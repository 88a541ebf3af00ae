"""Registers that warpgroup products read, in machine code: who wrote them, and who touches them.

The emulator runs PTX; what ptxas makes of registers shows here alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_REGISTER = re.compile(r"(?<!U)R(\d+)(\.64)?")
_PREDICATE = re.compile(r"!?U?P\d")
_JUMPS = ("BRA", "BRX", "BRXU", "CALL", "JMP")
# First operands that are read: nothing of a thread's registers is written.
_READERS = (
    "BAR", "BRA", "BRX", "BSSY", "BSYNC", "CALL", "CCTL", "ERRBAR", "EXIT", "FENCE", "FSETP",
    "HSETP2", "ISETP", "MEMBAR", "NOP", "PLOP3", "R2P", "R2UR", "RED", "RET", "ST", "STG", "STL",
    "STS", "STSM", "UTMALDG", "UTMASTG", "VOTEU", "WARPGROUP", "WARPSYNC",
)  # fmt: skip
_LOADS = ("ATOMG", "LD", "LDC", "LDG", "LDL", "LDS", "LDSM")


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


def _at(operand: str, count: int) -> int:
    found = re.match(r"[-|~!]*R(\d+)", operand)
    return _bits(int(found[1]), count) if found else 0


@dataclass(frozen=True)
class Instruction:
    """What registers it reads and writes, a bit each; of a product, those of its left operand."""

    text: str
    sometimes: bool  # it has a predicate
    opcode: str
    operands: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, text: str) -> Instruction:
        found = re.match(r"(@!?U?PT?\d?\s+)?(\S+)\s*(.*)", text)
        assert found
        operands = tuple(part.strip() for part in found[3].split(","))
        return cls(text, bool(found[1]) and "PT" not in found[1], found[2], operands)

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_product(self) -> bool:
        return self.base in ("HGMMA", "QGMMA") and self.operands[1].startswith("R")

    @property
    def left(self) -> int:
        return _at(self.operands[1], 4) if self.is_product else 0

    @property
    def reads(self) -> int:
        if self.base in ("HGMMA", "QGMMA"):
            return 0  # what it adds to stays with the product
        mentioned = 0
        for operand in self.operands:
            for found in _REGISTER.finditer(operand):
                mentioned |= _bits(int(found[1]), 2 if found[2] else 1)
        if self.base in ("STG", "STS", "ST", "STL", "STSM"):
            mentioned |= _at(self.operands[-1], self._width)
        return mentioned

    @property
    def writes(self) -> int:
        if self.base in ("HGMMA", "QGMMA"):
            shape = re.search(r"64x(\d+)x", self.opcode)
            assert shape
            return _at(self.operands[0], int(shape[1]) // 2)
        if self.base in _READERS:
            return 0
        predicated = re.match(r"U?P(\d|T)|UR", self.operands[0])
        to = self.operands[1] if predicated and len(self.operands) > 1 else self.operands[0]
        return _at(to, self._width)

    @property
    def _width(self) -> int:
        parts = self.opcode.split(".")
        if self.base in ("LDSM", "STSM"):
            return next((int(part) for part in parts if part in ("2", "4")), 1)
        if self.base == "CS2R":
            return 1 if "32" in parts else 2
        if self.base in _LOADS or self.base.startswith("ST"):
            return 4 if "128" in parts else 2 if "64" in parts else 1
        return 2 if "WIDE" in parts or "64" in parts else 1


class Code:
    """Instructions of a kernel, and which may follow which."""

    def __init__(self, texts: tuple[str, ...], labels: dict[str, int]) -> None:
        self.code = [Instruction.of(text) for text in texts]
        self.after = [self._after(i, labels) for i in range(len(texts))]
        self.before: list[list[int]] = [[] for _ in texts]
        for i, following in enumerate(self.after):
            for j in following:
                self.before[j].append(i)
        self.writes = [instruction.writes for instruction in self.code]

    def _after(self, i: int, labels: dict[str, int]) -> list[int]:
        this = self.code[i]
        targets = [labels[name] for name in re.findall(r"\.L_x_\d+", this.text)]
        targets = targets if this.base in _JUMPS else []
        goes_on = this.base not in ("BRX", "BRXU", "RET", "JMP")
        if this.base == "BRA":
            by_operand = any(_PREDICATE.match(operand) for operand in this.operands)
            goes_on = (
                this.sometimes or by_operand or ".DIV" in this.opcode or ".CONV" in this.opcode
            )
        if this.base == "EXIT":
            goes_on = this.sometimes
        return targets + ([i + 1] if goes_on and i + 1 < len(self.code) else [])

    def sources(self, product: int) -> set[int]:
        """The instructions whose results a product may find in its left operand."""
        found: set[int] = set()
        passed: dict[int, int] = {}
        todo = [(i, self.code[product].left) for i in self.before[product]]
        while todo:
            i, wanted = todo.pop()
            wanted &= ~passed.get(i, 0)
            if not wanted:
                continue
            passed[i] = passed.get(i, 0) | wanted
            if wanted & self.writes[i]:
                found.add(i)
                if not self.code[i].sometimes:
                    wanted &= ~self.writes[i]
            todo += [(j, wanted) for j in self.before[i]]
        return found

    def confused(self) -> list[str]:
        """Results that one product takes as rows of queries and another as weights.

        Those of the second kind meet values, whose rows are not the k dimension.
        """
        taken: list[set[int]] = [set(), set()]
        for i, instruction in enumerate(self.code):
            if instruction.is_product:
                taken["tnspB" in instruction.text] |= self.sources(i)
        return [self.code[i].text for i in sorted(taken[0] & taken[1])]

    def touched(self) -> list[str]:
        """Instructions that touch registers of products which may not be done yet."""
        faults: set[int] = set()
        seen: set[tuple[int, int, int, tuple[tuple[int, int], ...]]] = set()
        todo: list[tuple[int, int, int, tuple[tuple[int, int], ...]]] = [(0, 0, 0, ())]
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            i, left, sums, groups = state
            this = self.code[i]
            all_left, all_sums = left, sums
            for more_left, more_sums in groups:
                all_left, all_sums = all_left | more_left, all_sums | more_sums
            if this.base in ("HGMMA", "QGMMA"):
                if this.writes & all_left or this.left & all_sums:
                    faults.add(i)
                left, sums = left | this.left, sums | this.writes
                if "gsb0" in this.text:
                    groups, left, sums = (*groups, (left, sums)), 0, 0
            elif this.opcode == "WARPGROUP.DEPBAR.LE":
                kept = int(this.operands[1], 16)
                groups = groups[len(groups) - kept :] if kept else ()
            elif self.writes[i] & (all_left | all_sums) or this.reads & all_sums:
                faults.add(i)
            todo += [(j, left, sums, groups) for j in self.after[i]]
        return [self.code[i].text for i in sorted(faults)]
