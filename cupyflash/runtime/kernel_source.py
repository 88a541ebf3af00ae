"""The text of a kernel: one string with its includes inlined, and the options it is compiled with.

Subnormals: ``--ftz=true`` flushes them in plain C++ arithmetic. CuPy adds the same option to all it
compiles, so a string has the same bits on either way; where subnormals count (conversions, merges,
cache writes) the kernels use PTX instructions without ``.ftz``. Division stays correctly rounded.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from . import env
from .errors import CompileError
from .variant import Variant

__all__ = ["kernel_root", "kernel_source"]

_INCLUDE = re.compile(r'\s*#\s*include\s*(?:"([^"]+)"|(.*))')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


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
    _inline(root, root / variant.source, lines, set())
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


def _inline(root: Path, path: Path, lines: list[str], seen: set[Path]) -> None:
    """Append a file; each include takes its place the first time."""
    seen.add(path)
    name = path.relative_to(root).as_posix()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CompileError(f"{path}: {error.strerror or error}") from error
    lines.append(f'#line 1 "{name}"')
    for number, line in enumerate(text.splitlines(), 1):
        found = _INCLUDE.match(line)
        if found is None:
            lines.append("" if _PRAGMA_ONCE.match(line) else line)
            continue
        lines.append("")
        included = _resolve(root, path, found[1], f"{name}:{number}: {line.strip()}")
        if included not in seen:
            _inline(root, included, lines, seen)
            lines.append(f'#line {number + 1} "{name}"')


def _resolve(root: Path, path: Path, included: str | None, where: str) -> Path:
    for folder in (root, path.parent) if included else ():
        found = (folder / str(included)).resolve()
        if found.is_file() and found.is_relative_to(root.resolve()):
            return root / found.relative_to(root.resolve())
    raise CompileError(f"{where}: kernels include files of {root} and nothing else")
