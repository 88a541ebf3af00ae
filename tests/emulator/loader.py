"""A lowered kernel in the machine's memory."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from .library import library
from .program import SHARED_BASE, Lowering
from .ptx import Module, Symbol, parse
from .registers import assign_slots

__all__ = ["LoadedModule", "Program"]


def words(values: Any) -> np.ndarray:
    return np.array(values, np.int64).astype(np.int32, casting="unsafe")


@dataclass
class Program:
    """One kernel, ready to launch."""

    low: Lowering
    symbol: str
    files: dict[int, str]
    buffers: list[np.ndarray]
    regions: list[tuple[int, int, int]]
    source: str = ""  # the library's file that it was compiled from

    def __post_init__(self) -> None:
        low = self.low
        file_words = assign_slots(low)
        code, args = [], []
        for insn in low.code:
            defs = uses = 0
            start = len(args)
            for i, a in enumerate(insn.args):
                bit = 1 << min(i, 31)
                if isinstance(a, tuple):
                    defs |= bit if a[1] & 2 else 0
                    uses |= bit if a[1] & 1 else 0
                    args.append(a[0].slot)
                else:
                    args.append(a)
            pred = insn.pred.slot if insn.pred is not None else -1
            count = len(insn.args)
            code += [insn.op, pred, int(insn.negate), insn.flags, count, start, defs, uses]
        consts = []
        for (width, value), reg in low.consts.items():
            kind = {0: 2, 1: 0, 2: 1}[width]
            consts += [reg.slot, kind, value & 0xFFFFFFFF, value >> 32]
        specials = [x for number, reg in low.specials.items() for x in (reg.slot, number)]
        arrays = [words(code), words(args), words(consts), words(specials)]
        source: list[int] = []
        counts = (len(low.code), len(args), len(consts), len(specials))
        for array, count in zip(arrays, counts, strict=True):
            source += [array.ctypes.data, count]
        static = low.static_end - SHARED_BASE
        source += [file_words, low.local_bytes, static, low.dynamic_base]
        packed = np.array(source, np.int64)
        self.handle = library().emu_load(ctypes.c_void_p(packed.ctypes.data))
        self.param_bytes = low.param_bytes
        self.static_smem = static
        self.mnemonics = [self._mnemonic(insn.text) for insn in low.code]

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            library().emu_free(self.handle)
            self.handle = None

    @staticmethod
    def _mnemonic(text: str) -> str:
        m = re.match(r"(?:@!?[\w$%]+\s+)?([\w.:]+)", text)
        return m[1] if m else text

    def where(self, pc: int) -> str:
        """``file.cu:12 (ptx text)`` of an instruction."""
        if pc >= len(self.low.code):
            return f"instruction {pc}"
        insn = self.low.code[pc]
        number, line = self.low.lines[insn.line]
        name = PurePath(self.files.get(number, "?")).name
        return f"{name}:{line} ({' '.join(insn.text.split())[:90]})"

    def explain(self, text: str) -> str:
        """A message of the machine, with its @12@ as source lines."""
        return re.sub(r"@(\d+)@", lambda m: self.where(int(m[1])), text)

    def by_mnemonic(self, hits: np.ndarray) -> dict[str, int]:
        out: Counter[str] = Counter()
        for name, count in zip(self.mnemonics, hits.tolist(), strict=True):
            if count:
                out[name] += count
        return dict(out)


class LoadedModule:
    """A PTX module with its global variables; programs are made on first use."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.module: Module = parse(ptx)
        self.buffers: list[np.ndarray] = []
        self.regions: list[tuple[int, int, int]] = []
        self.addresses: dict[str, int] = {}
        self.programs: dict[str, Program] = {}
        for s in self.module.symbols.values():
            if s.space in ("global", "const"):
                self._place(s)

    def _place(self, s: Symbol) -> None:
        align = max(s.align, 16)
        raw = np.full(s.nbytes + align + 64, 0xFF, np.uint8)
        start = 32 + -(raw.ctypes.data + 32) % align
        data = s.data or b""
        raw[start : start + s.nbytes] = 0
        raw[start : start + len(data)] = np.frombuffer(data, np.uint8)
        address = raw.ctypes.data + start
        self.buffers.append(raw)
        self.addresses[s.name] = address
        self.regions.append((address, address + s.nbytes, int(s.space == "global")))

    @property
    def kernels(self) -> list[str]:
        return [f.name for f in self.module.functions.values() if f.kind == "entry"]

    def program(self, symbol: str) -> Program:
        if symbol not in self.programs:
            low = Lowering(self.module, symbol, self.addresses)
            files, buffers = self.module.files, self.buffers
            self.programs[symbol] = Program(low, symbol, files, buffers, self.regions)
        return self.programs[symbol]
