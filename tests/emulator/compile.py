"""NVRTC to PTX, cached on disk by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from .library import cache_folder

__all__ = ["compile_ptx"]


def compile_ptx(
    source: str,
    options: Sequence[str] = (),
    name: str = "kernel.cu",
    headers: dict[str, str] | None = None,
    expressions: Sequence[str] = (),
) -> tuple[str, dict[str, str]]:
    """PTX text and the symbol of each name expression. ``options`` hold the architecture.

    Raises
    ------
    RuntimeError
        NVRTC refused the source; the text holds its log.
    """
    from cupy.cuda import nvrtc

    headers = headers or {}
    options = [*options, *(["-lineinfo"] if "-lineinfo" not in options else [])]
    text = "\0".join([source, name, *options, *headers, *headers.values(), *expressions])
    version = ".".join(map(str, nvrtc.getVersion()))
    key = hashlib.sha256((text + version).encode()).hexdigest()[:24]
    cached = cache_folder() / f"{key}.ptx"
    symbols = cache_folder() / f"{key}.sym"
    if cached.exists() and symbols.exists():
        pairs = [line.split("\t") for line in symbols.read_text().splitlines()]
        return cached.read_text(), dict(pairs)
    contents = [h.encode() for h in headers.values()]
    program = nvrtc.createProgram(source, name, contents, [h.encode() for h in headers])
    try:
        for e in expressions:
            nvrtc.addNameExpression(program, e)
        nvrtc.compileProgram(program, options)
        ptx = nvrtc.getPTX(program).decode().rstrip("\0")
        names = {e: nvrtc.getLoweredName(program, e) for e in expressions}
    except nvrtc.NVRTCError as e:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"NVRTC {' '.join(options)}:\n{log}") from e
    finally:
        nvrtc.destroyProgram(program)
    lines = "".join(f"{a}\t{b}\n" for a, b in names.items())
    for path, data in ((symbols, lines), (cached, ptx)):
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(data)
        os.replace(partial, path)
    return ptx, names
