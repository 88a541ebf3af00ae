"""CuPy, or what stands in its way."""

from __future__ import annotations

from typing import Any

from .errors import CompileError

__all__ = ["load_cupy"]


def load_cupy() -> Any:
    """CuPy's module.

    Raises
    ------
    ImportError
        It is not installed.
    CompileError
        It is, and importing it fails; it makes its cache folder at once, wherever that is.
    """
    try:
        import cupy
    except OSError as error:
        raise CompileError(
            f"CuPy cannot be imported ({error}); if that is its cache folder, set CUPY_CACHE_DIR "
            "to a folder that can be written before Python starts"
        ) from error
    return cupy
