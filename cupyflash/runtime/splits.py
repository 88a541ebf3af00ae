"""Into how many pieces keys are cut where there are too few tiles to fill a device."""

from __future__ import annotations

from collections.abc import Callable

from .problem import AttentionProblem

__all__ = ["MOST_SPLITS", "NEVER_SPLIT", "choose_chunk", "fewest_pieces", "visible_keys"]

MOST_SPLITS = 128
"""Pieces that attention_combine.cu merges at most."""

NEVER_SPLIT = 1 << 30
"""A chunk of keys that no request reaches the end of."""

_NEARLY = 0.85


def fewest_pieces(items: int, resident: int, most: int) -> int:
    """The fewest pieces that keep a device nearly as busy as any number of them.

    Parameters
    ----------
    items : int
        Tiles before they are cut.
    resident : int
        Tiles that run at the same time.
    most : int
        Pieces of a tile at most; below 1 is taken as 1.
    """
    counts = range(1, max(1, most) + 1)

    def busy(count: int) -> float:
        return items * count / resident / -(-items * count // resident)

    best = max(map(busy, counts))
    return next(count for count in counts if busy(count) >= _NEARLY * best)


def visible_keys(problem: AttentionProblem, tokens: int) -> int:
    """Keys that so many neighbouring tokens of a request see at most."""
    left, right = problem.window_left, problem.window_right
    if left < 0 or right < 0:
        return problem.max_seqlen_k
    return min(problem.max_seqlen_k, left + right + tokens)


def choose_chunk(
    problem: AttentionProblem,
    visible: int,
    tile_keys: int,
    wanted: int,
    fits: Callable[[int], bool],
) -> tuple[int, int]:
    """Keys of a chunk, and chunks a row may have.

    Parameters
    ----------
    problem : AttentionProblem
    visible : int
        Keys that a tile sees at most.
    tile_keys : int
        A chunk is a multiple of these.
    wanted : int
        Chunks a row may have at most.
    fits : callable
        Whether there is memory for the partial results of so many chunks.
    """
    for count in range(min(wanted, MOST_SPLITS, -(-visible // tile_keys)), 1, -1):
        chunk = -(-visible // count // tile_keys) * tile_keys
        # Chunks lie at multiples of their size, so a window may touch one more.
        touched = min(-(-problem.max_seqlen_k // chunk), (visible + chunk - 2) // chunk + 1)
        if 1 < touched <= wanted and fits(touched):
            return chunk, touched
    return NEVER_SPLIT, 1
