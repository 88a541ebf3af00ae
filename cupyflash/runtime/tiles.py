"""Blocks of kernels that move rows: threads x along a row, y over heads, z over tokens."""

from __future__ import annotations

__all__ = ["row_block", "row_steps"]


def row_block(
    threads: int, tokens: int, heads: int, steps: int, *, thread_tokens: int, tile_tokens: int
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Grid ``(token tiles, head tiles)`` and block, of at most ``threads`` threads.

    A row takes ``steps`` threads, one after the other if they are too many; a thread takes
    ``thread_tokens`` tokens. A block covers about ``tile_tokens`` if the heads fill it, and more
    if they do not.
    """
    x = min(steps, threads)
    rows = threads // x
    z = min(rows, -(-min(tile_tokens, tokens) // thread_tokens))
    y = min(heads, rows // z)
    z = min(rows // y, -(-tokens // thread_tokens), 64)
    return (-(-tokens // (z * thread_tokens)), -(-heads // y)), (x, y, z)


def row_steps(head_dim: int, itemsize: int, vectorised: bool) -> int:
    """Accesses to a row: 16 bytes each, or one element."""
    return max(1, head_dim * itemsize // 16) if vectorised else head_dim
