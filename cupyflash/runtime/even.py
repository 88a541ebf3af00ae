"""Batches of few requests that are all alike, whose spans are known before the lengths are."""

from __future__ import annotations

from typing import NamedTuple

from .divisors import inverse

__all__ = ["NOT_EVEN", "Even", "even_cut"]

_MOST_PIECES = 128  # of a segment, as block/spans.cuh has it
_MOST_TILES = 1 << 25  # up to which the kernel divides by `Even.pieces_inverse`


class Even(NamedTuple):
    """What block/even_span.cuh goes by, in the order of ``DecodeParams``.

    Attributes
    ----------
    pieces : int
        Of every segment; 0: such batches are not looked for.
    pieces_inverse, units_inverse : int
    least, most : int
        Tiles of a segment that is cut into so many.
    """

    pieces: int
    pieces_inverse: int
    units_inverse: int
    least: int
    most: int


NOT_EVEN = Even(0, 0, 0, 0, 0)


def even_cut(batch: int, units: int, spans: int, fewest_shift: int, align_most: int) -> Even:
    """How block/spans.cuh cuts such a batch where every segment is long enough.

    Parameters
    ----------
    batch : int
    units : int
        Segments of a request.
    spans : int
        That there may be.
    fewest_shift : int
        log2 of the tiles that a span has at least.
    align_most : int
        Tiles of all segments together, up to which they are cut alike.
    """
    segments = batch * units
    pieces = min(spans // segments, _MOST_PIECES) if segments else 0
    if not pieces or (pieces * segments * 8 < spans * 7 and pieces < _MOST_PIECES):
        return NOT_EVEN
    least = -(-(spans << fewest_shift) // segments)
    most = min(align_most // segments, _MOST_TILES)
    return Even(pieces, inverse(pieces), inverse(units), least, most)
