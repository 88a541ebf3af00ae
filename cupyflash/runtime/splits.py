"""Into how many pieces keys are cut where there are too few tiles to fill a device."""

from __future__ import annotations

__all__ = ["MOST_SPLITS", "fewest_pieces"]

MOST_SPLITS = 128
"""Pieces that attention_combine.cu merges at most."""

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
