"""The compiled machine: built by g++ into a cache folder on first use."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["Opcode", "library", "opcodes"]

SOURCES = Path(__file__).resolve().parent / "vm"
FLAGS = ["-std=c++17", "-O2", "-march=native", "-fPIC", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"]
PRODUCT_FLAGS = ["-O3", "-ffp-contract=fast"]  # of the tensor cores' sums


@functools.cache
def _compiler() -> tuple[str, ...]:
    """``CXX``, or the first of the usual names, or the ziglang package."""
    if chosen := os.environ.get("CXX"):
        return tuple(shlex.split(chosen))
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return (name,)
    return (sys.executable, "-m", "ziglang", "c++")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(line for line in lines[:40] if line.startswith(("model name", "flags")))
    except OSError:
        return os.uname().machine


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()
    folder = Path(base) / f"cupyflash-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _build(target: Path) -> None:
    """Compiles the sources side by side; the library appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:

        def compile_one(source: Path) -> str:
            out = f"{scratch}/{source.stem}.o"
            flags = [*FLAGS, *PRODUCT_FLAGS] if source.stem in ("matrix", "wgmma") else FLAGS
            run = subprocess.run(
                [*_compiler(), *flags, "-c", str(source), "-o", out],
                capture_output=True,
                text=True,
            )
            if run.returncode:
                raise RuntimeError(
                    f"{' '.join(_compiler())} failed on {source.name}:\n{run.stderr[:4000]}"
                )
            return out

        sources = sorted(SOURCES.glob("*.cpp"), key=lambda p: -p.stat().st_size)
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_one, sources))
        partial = f"{scratch}/emulator.so"
        subprocess.run([*_compiler(), "-shared", "-o", partial, *objects], check=True)
        os.replace(partial, target)


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library, compiled if this source has not been compiled for this CPU before."""
    key = hashlib.sha256((" ".join([*_compiler(), *FLAGS, *PRODUCT_FLAGS]) + _cpu()).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    target = cache_folder() / f"vm-{key.hexdigest()[:20]}.so"
    if not target.exists():
        with open(
            target.with_suffix(".lock"), "w"
        ) as lock:  # one process compiles, the others wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(target)
    lib = ctypes.CDLL(str(target))
    lib.emu_table.restype = ctypes.c_int64
    lib.emu_table.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    lib.emu_load.restype = ctypes.c_void_p
    lib.emu_load.argtypes = [ctypes.c_void_p]
    lib.emu_free.argtypes = [ctypes.c_void_p]
    lib.emu_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64]
    return lib


class Opcode(tuple):
    """(number, operand letters, allowed modifier bits)"""


@functools.cache
def opcodes() -> dict[str, list[Opcode]]:
    """The machine's table by name; one name may have several operand lists."""
    lib = library()
    text = ctypes.create_string_buffer(lib.emu_table(None, 0) + 1)
    lib.emu_table(text, len(text))
    table: dict[str, list[Opcode]] = {}
    for number, line in enumerate(text.value.decode().splitlines()):
        name, operands, modifiers, _ = line.split("\t")
        table.setdefault(name, []).append(Opcode((number, operands, int(modifiers))))
    return table
