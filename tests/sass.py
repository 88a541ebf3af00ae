"""Machine code of a kernel: its instructions, and the loops that hold matrix products."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from cupyflash.runtime.compile import compile_source, kernel_source
from cupyflash.runtime.variant import Variant

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BACK = re.compile(r"BRA(?:\.\S+)? .*\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Loop:
    """Instructions from the target of a backward branch to the branch."""

    body: tuple[str, ...]

    def count(self, opcode: str) -> int:
        return sum(opcode in text for text in self.body)

    def between_waits(self, opcode: str) -> int:
        """How many stand between the wait for the first product and that for the last."""
        waits = [i for i, text in enumerate(self.body) if "WARPGROUP.DEPBAR" in text]
        return sum(opcode in text for text in self.body[waits[0] : waits[-1]])

    def before(self, opcode: str, of: str, number: int) -> int:
        """How many stand after the wait for the last product and before the n-th of another."""
        last = max(i for i, text in enumerate(self.body) if "WARPGROUP.DEPBAR" in text)
        behind = self.body[last:]
        end = [i for i, text in enumerate(behind) if of in text][number - 1]
        return sum(opcode in text for text in behind[:end])


def disassembler() -> str:
    """Path of nvdisasm; a test that needs it is skipped without."""
    found = shutil.which("nvdisasm")
    if found is None:
        import nvidia

        folders = (Path(folder) for folder in nvidia.__path__)
        found = next((str(p) for f in folders for p in f.glob("*/bin/nvdisasm")), None)
    if found is None:
        pytest.skip("nvdisasm is not installed (nvidia-cuda-nvdisasm)")
    return found


@lru_cache(maxsize=8)
def instructions(variant: Variant, tool: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """Every instruction of a kernel, and where labels point to."""
    import tempfile

    source, options = kernel_source(variant)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_source(source, options, variant)[0])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.stdout.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            found.append(instruction[1])
    return tuple(found), labels


def product_loops(variant: Variant) -> list[Loop]:
    """The innermost loops that issue warpgroup products."""
    code, labels = instructions(variant, disassembler())
    spans: list[tuple[int, int]] = []
    for i, text in enumerate(code):
        back = _BACK.search(text)
        start = labels.get(back[1], len(code)) if back else len(code)
        inner = any(start <= low and high <= i for low, high in spans)
        if start < i and not inner and any("GMMA" in t for t in code[start:i]):
            spans.append((start, i))
    return [Loop(code[start : end + 1]) for start, end in spans]
