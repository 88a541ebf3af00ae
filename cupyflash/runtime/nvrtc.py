"""The NVRTC that CuPy finds; its version and architectures without loading it, once it was seen.

Loading NVRTC takes a process 20 to 80 ms, and one that finds all kernels compiled needs only its
version, which is in their names. So the version is kept on disk, and holds while the library's file
and the folder of installed packages are what they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from . import env
from .cubin_cache import cubin_cache
from .cupy_import import load_cupy
from .errors import CompileError

__all__ = ["Compiler", "compiler", "load_nvrtc"]


class Compiler(NamedTuple):
    """NVRTC's version, and the architectures that it compiles for."""

    version: tuple[int, int]
    archs: tuple[int, ...]


def load_nvrtc() -> Any:
    """CuPy's NVRTC module.

    Raises
    ------
    CompileError
        There is no CuPy, or no NVRTC.
    """
    try:
        nvrtc = load_cupy().cuda.nvrtc
        nvrtc.getVersion()
    except CompileError:
        raise
    except Exception as error:  # CuPy raises ImportError, RuntimeError or its own, by version
        raise CompileError(
            f"NVRTC is not available ({error}); pip install 'cupyflash[cuda13]' or [cuda12]"
        ) from error
    return nvrtc


@cache
def compiler() -> Compiler:
    """What compiles here.

    Raises
    ------
    CompileError
        As `load_nvrtc`.
    """
    record = cubin_cache().folder / f"nvrtc-{_environment()}.json"
    found = _recorded(record)
    if found is None:
        nvrtc = load_nvrtc()
        found = Compiler(nvrtc.getVersion(), tuple(nvrtc.getSupportedArchs()))
        _write(record, found)
    return found


def _environment() -> str:
    """What decides which library CuPy loads."""
    text = "\0".join([sys.prefix, str(_packages()), *env.cuda_places()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _packages() -> Path | None:
    """The folder that CuPy is installed in; installing anything there changes its time."""
    spec = find_spec("cupy")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def _recorded(record: Path) -> Compiler | None:
    try:
        kept = json.loads(record.read_text())
        if _identity(kept["library"]) != kept["identity"]:
            return None
        major, minor = kept["version"]
        return Compiler((int(major), int(minor)), tuple(map(int, kept["archs"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(record: Path, found: Compiler) -> None:
    library = _loaded_library()
    if library is None:
        return
    kept = {**found._asdict(), "library": library, "identity": _identity(library)}
    partial = record.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(kept))
        os.replace(partial, record)
    except OSError:
        partial.unlink(missing_ok=True)


def _identity(library: str) -> list[int]:
    file, packages = os.stat(library), _packages()
    changed = 0 if packages is None else packages.stat().st_mtime_ns
    return [file.st_size, file.st_mtime_ns, changed]


def _loaded_library() -> str | None:
    """The file of NVRTC in this process."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].rstrip() for line in maps if "/libnvrtc.so" in line}
    except OSError:
        return None
    return paths.pop() if len(paths) == 1 else None
