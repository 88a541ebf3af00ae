"""Every ``CUPYFLASH_*`` environment variable, and the few others. No other file reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = [
    "cache_dir",
    "check",
    "cuda_places",
    "debug",
    "default_cache_dir",
    "fa_version",
    "lineinfo",
    "no_compile",
    "of_calls",
    "settings",
]


# Every call asks for some variables, and os.environ takes 0.8 us to say that it is not set: it
# encodes the name, raises and catches. Its own dict says so at once.
_ENCODED: Any = getattr(os.environb, "_data", os.environb)
_none_set = _ENCODED.keys().isdisjoint
_OF_CALLS = (b"CUPYFLASH_DEBUG", b"CUPYFLASH_CHECK", b"CUPYFLASH_FA_VERSION")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")


def debug() -> bool:
    """``CUPYFLASH_DEBUG=1``: say which kernels are loaded, and mark calls for profilers (NVTX)."""
    return b"CUPYFLASH_DEBUG" in _ENCODED and _flag("CUPYFLASH_DEBUG")


def check() -> bool:
    """``CUPYFLASH_CHECK=1``: validate lengths, tables and slots by reading them (synchronises)."""
    return b"CUPYFLASH_CHECK" in _ENCODED and _flag("CUPYFLASH_CHECK")


def of_calls() -> tuple[bytes | None, ...]:
    """`debug`, `check` and `fa_version` as they are; nothing where none is set."""
    return () if _none_set(_OF_CALLS) else tuple(map(_ENCODED.get, _OF_CALLS))


def no_compile() -> bool:
    """``CUPYFLASH_NO_COMPILE=1``: raise instead of compiling; shows that a run is warm."""
    return _flag("CUPYFLASH_NO_COMPILE")


def lineinfo() -> bool:
    """``CUPYFLASH_LINEINFO=1``: compile with source lines, for profilers and sanitizers."""
    return _flag("CUPYFLASH_LINEINFO")


def fa_version() -> str | None:
    """``CUPYFLASH_FA_VERSION=2|3``: the version to use where the call does not name one."""
    if b"CUPYFLASH_FA_VERSION" not in _ENCODED:
        return None
    return os.environ.get("CUPYFLASH_FA_VERSION") or None


def cache_dir() -> Path | None:
    """``CUPYFLASH_CACHE_DIR``: where compiled kernels are kept; None when it is not set."""
    value = os.environ.get("CUPYFLASH_CACHE_DIR")
    return Path(value).expanduser() if value else None


def default_cache_dir() -> Path:
    """The user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``) with ``cupyflash`` in it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "cupyflash"


def cuda_places() -> tuple[str, ...]:
    """Where CuPy looks for CUDA's libraries besides its own packages."""
    return tuple(os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME", "LD_LIBRARY_PATH"))


def settings() -> dict[str, str]:
    """Every ``CUPYFLASH_*`` variable that is set."""
    return {name: text for name, text in os.environ.items() if name.startswith("CUPYFLASH_")}
