"""A kernel as the machine takes it, kept on disk: lowering a large kernel takes a second."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .library import cache_folder, library, opcodes
from .names import DEF, USE
from .program import SHARED_BASE, Lowering
from .ptx import Module
from .registers import assign_slots

__all__ = ["Image", "image_of"]


@dataclass
class Image:
    """``text`` (a line) and ``places`` (file, line) [n, 2]: of each instruction.

    ``movable``: it holds no address of a variable.
    """

    code: np.ndarray
    args: np.ndarray
    consts: np.ndarray
    specials: np.ndarray
    file_words: int
    local_bytes: int
    static_smem: int
    dynamic_base: int
    param_bytes: int
    param_offsets: list[int]
    param_sizes: list[int]
    cluster: tuple[int, ...] | None
    text: str
    places: np.ndarray
    movable: bool

    @functools.cached_property
    def texts(self) -> list[str]:
        return self.text.split("\n")


def words(values: Any) -> np.ndarray:
    return np.array(values, np.int64).astype(np.int32, casting="unsafe")


def lower(module: Module, symbol: str, addresses: dict[str, int]) -> Image:
    low = Lowering(module, symbol, addresses)
    file_words = assign_slots(low)
    code: list[int] = []
    args: list[int] = []
    for insn in low.code:
        defs = uses = 0
        start, bit = len(args), 1
        for a in insn.args:
            if type(a) is tuple:
                args.append(a[0].slot)
                if a[1] & DEF:
                    defs |= bit
                if a[1] & USE:
                    uses |= bit
            else:
                args.append(a)
            if bit < 1 << 31:
                bit <<= 1
        pred = insn.pred.slot if insn.pred is not None else -1
        count = len(insn.args)
        code += (insn.op, pred, int(insn.negate), insn.flags, count, start, defs, uses)
    consts = []
    for (width, value), reg in low.consts.items():
        kind = {0: 2, 1: 0, 2: 1}[width]
        consts += [reg.slot, kind, value & 0xFFFFFFFF, value >> 32]
    specials = [x for number, reg in low.specials.items() for x in (reg.slot, number)]
    return Image(
        *map(words, (code, args, consts, specials)),
        file_words=file_words,
        local_bytes=low.local_bytes,
        static_smem=low.static_end - SHARED_BASE,
        dynamic_base=low.dynamic_base,
        param_bytes=low.param_bytes,
        param_offsets=list(low.param_offset.values()),
        param_sizes=low.param_sizes,
        cluster=low.cluster,
        text="\n".join(insn.text for insn in low.code),
        places=np.array(low.lines, np.int32)[[insn.line for insn in low.code]],
        movable=not low.has_addresses,
    )


@contextmanager
def no_collections() -> Iterator[None]:
    """Lowering makes a hundred thousand objects and no cycles, so collections only cost time."""
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            gc.enable()


@functools.cache
def _front_end() -> bytes:
    """The lowering and the opcode numbers that an image depends on."""
    digest = hashlib.sha256(repr(opcodes()).encode())
    folder = Path(__file__).parent
    for name in ("image", "lower*", "names", "program", "ptx", "registers"):
        for path in sorted(folder.glob(f"{name}.py")):
            digest.update(path.read_bytes())
    return digest.digest()


def image_of(module: Module, symbol: str, addresses: dict[str, int], ptx: str) -> Image:
    """From the disk if it is there. Images that hold addresses of variables are not kept."""
    library()
    key = hashlib.sha256(_front_end() + symbol.encode() + ptx.encode()).hexdigest()[:24]
    kept = cache_folder() / f"{key}.image"
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    with no_collections():
        image = lower(module, symbol, addresses)
    if not image.movable:
        return image
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(image))
    os.replace(partial, kept)
    return image
