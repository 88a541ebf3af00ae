"""The text of a kernel: one string with its includes inlined, and the options it is compiled with.

Subnormals: ``--ftz=true`` flushes them in plain C++ arithmetic. CuPy adds the same option to all it
compiles, so a string has the same bits on either way; where subnormals count (conversions, merges,
cache writes) the kernels use PTX instructions without ``.ftz``. Division stays correctly rounded.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from . import env
from .errors import CompileError
from .variant import Variant

__all__ = ["kernel_root", "kernel_source"]

_DIRECTIVE = re.compile(
    r'^[ \t]*#[ \t]*(?:(?P<include>include)[ \t]*(?:"(?P<name>[^"\n]+)")?.*|pragma[ \t]+once\b.*)$',
    re.MULTILINE,
)


@cache
def kernel_root() -> Path:
    """``kernels_cu``: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "kernels_cu", package.parent / "kernels_cu"):
        if root.is_dir():
            return root
    raise CompileError(f"kernels_cu is neither in {package} nor beside it; reinstall cupyflash")


def kernel_source(variant: Variant, root: Path | None = None) -> tuple[str, tuple[str, ...]]:
    """One self-contained source string and its NVRTC options.

    It also compiles as it is with ``cupy.RawModule(code=source, options=options)``. There NVRTC
    before 12.9 refuses the second architecture that CuPy appends; leave out the first option.

    Parameters
    ----------
    variant : Variant
    root : Path, optional
        Where the kernels are; the package's own if None.

    Returns
    -------
    source : str
    options : tuple of str
        The architecture first.

    Raises
    ------
    CompileError
        A file is missing, or includes one from outside ``kernels_cu``.
    """
    root = kernel_root() if root is None else root
    lines = [f"#define KERNEL_NAME {variant.symbol}"]
    lines += [f"#define {name} {value}" for name, value in variant.defines]
    _inline(os.path.realpath(root), variant.source, lines, set())
    options = (
        f"--gpu-architecture={variant.arch}",
        "--std=c++17",
        "--ftz=true",
        "--device-as-default-execution-space",
    )
    return "\n".join(lines) + "\n", (
        *options,
        "--generate-line-info",
    ) if env.lineinfo() else options


def _inline(root: str, name: str, lines: list[str], seen: set[str]) -> None:
    """Append a file of ``root``; each include takes its place the first time.

    Names are strings here: of a first call, paths would take most of the time.
    """
    seen.add(name)
    path = os.path.join(root, name)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise CompileError(f"{path}: {error.strerror or error}") from error
    lines.append(f'#line 1 "{name}"')
    copied = 0
    for found in _DIRECTIVE.finditer(text):
        if copied < found.start():
            lines.append(text[copied : found.start() - 1])
        lines.append("")
        copied = found.end() + 1
        if found["include"] is None:
            continue
        number = text.count("\n", 0, found.start()) + 1
        where = f"{name}:{number}: {found[0].strip()}"
        included = _resolve(root, os.path.dirname(path), found["name"], where)
        if included not in seen:
            _inline(root, included, lines, seen)
            lines.append(f'#line {number + 1} "{name}"')
    if copied < len(text):
        lines.append(text[copied:].removesuffix("\n"))


def _resolve(root: str, folder: str, included: str | None, where: str) -> str:
    for place in (root, folder) if included else ():
        found = os.path.join(place, str(included))
        if os.path.isfile(found):
            real = os.path.realpath(found)
            if real.startswith(root + os.sep):
                return real[len(root) + 1 :].replace(os.sep, "/")
    raise CompileError(f"{where}: kernels include files of {root} and nothing else")
