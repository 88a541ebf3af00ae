"""What kernels divide by, in the form in which they do it."""

from __future__ import annotations

__all__ = ["inverse", "log2", "page_shift"]


def log2(power: int) -> int:
    """Of a power of two."""
    return power.bit_length() - 1


def page_shift(page_size: int | None) -> int:
    """`log2` of the page size; -1 if it is no power of two, 0 without pages."""
    size = page_size or 1
    return -1 if size & (size - 1) else log2(size)


def inverse(divisor: int) -> int:
    """2**32 / ``divisor`` rounded up, modulo 2**32: 0 stands for 1."""
    return -(-(1 << 32) // divisor) % (1 << 32)
