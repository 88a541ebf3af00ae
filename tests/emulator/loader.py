"""A lowered kernel in the machine's memory."""

from __future__ import annotations

import ctypes
import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from .image import Image, image_of
from .library import library
from .ptx import Module, Symbol, parse

__all__ = ["LoadedModule", "Program"]


@dataclass
class Program:
    """One kernel, ready to launch."""

    image: Image
    symbol: str
    files: dict[int, str]
    buffers: list[np.ndarray]
    regions: list[tuple[int, int, int]]
    source: str = ""  # the library's file that it was compiled from

    def __post_init__(self) -> None:
        image = self.image
        source: list[int] = []
        counts = (len(image.places), len(image.args), len(image.consts), len(image.specials))
        arrays = (image.code, image.args, image.consts, image.specials)
        for array, count in zip(arrays, counts, strict=True):
            source += [array.ctypes.data, count]
        source += [image.file_words, image.local_bytes, image.static_smem, image.dynamic_base]
        packed = np.array(source, np.int64)
        self.handle = library().emu_load(ctypes.c_void_p(packed.ctypes.data))
        self.param_bytes = image.param_bytes
        self.static_smem = image.static_smem

    @functools.cached_property
    def mnemonics(self) -> list[str]:
        return [self._mnemonic(text) for text in self.image.texts]

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
        if pc >= len(self.image.places):
            return f"instruction {pc}"
        number, line = self.image.places[pc]
        name = PurePath(self.files.get(number, "?")).name
        return f"{name}:{line} ({' '.join(self.image.texts[pc].split())[:90]})"

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
            image = image_of(self.module, symbol, self.addresses, self.ptx)
            files, buffers = self.module.files, self.buffers
            self.programs[symbol] = Program(image, symbol, files, buffers, self.regions)
        return self.programs[symbol]
