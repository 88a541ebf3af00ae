"""Blocks of kernels that move rows: threads x along a row, y over heads, z over tokens."""

from __future__ import annotations

__all__ = ["TOKENS_PER_THREAD", "row_block"]

THREADS = 256
TOKENS_PER_THREAD = 4


def row_block(
    tokens: int, heads: int, accesses: int, wanted_tokens: int
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Grid ``(token tiles, head tiles)`` and block for ``accesses`` memory accesses a row.

    A thread takes ``TOKENS_PER_THREAD`` tokens; a block covers about ``wanted_tokens`` of them if
    the heads fill it, and more if they do not.
    """
    x = min(accesses, THREADS)
    rows = THREADS // x
    z = min(rows, -(-min(wanted_tokens, tokens) // TOKENS_PER_THREAD))
    y = min(heads, rows // z)
    z = min(rows // y, -(-tokens // TOKENS_PER_THREAD), 64)
    return (-(-tokens // (z * TOKENS_PER_THREAD)), -(-heads // y)), (x, y, z)
