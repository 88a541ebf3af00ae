"""Ranges that a profiler shows around calls, under ``CUPYFLASH_DEBUG``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .cupy_import import load_cupy

__all__ = ["call_range"]


@contextmanager
def call_range(text: str) -> Iterator[None]:
    """A range of NVTX around a block, on its thread; nothing where there is no CuPy."""
    try:
        nvtx = load_cupy().cuda.nvtx
    except ImportError:
        yield
        return
    nvtx.RangePush(f"cupyflash: {text}")
    try:
        yield
    finally:
        nvtx.RangePop()
