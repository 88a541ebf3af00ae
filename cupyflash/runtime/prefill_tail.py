"""Which tiles of a prefill have their keys cut, so that the last round is as full as others."""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceInfo
from .fp8_tile import Fp8Tile
from .problem import AttentionProblem
from .splits import visible_keys
from .workspace import COUNTERS

__all__ = ["NO_TAIL", "Tail", "choose_tail", "largest_tail_bytes", "may_be_cut", "tail_bytes"]

_SMALLEST_PIECE = 512  # keys
_MOST_PIECES = 16  # of a tile: the last of them adds all up
_ROUNDS = 4  # of pieces, at most: what they leave each other takes memory
_ALIKE = 0.75  # the shortest tile over the longest one
# What a round of pieces costs besides their keys, and each piece of a tile when all are added up:
# 4 and 0.9 us on an H200, as keys.
_PIECE_COST, _MERGE_COST = 430, 96
_WORTH = 0.99  # of the time without


class Tail(NamedTuple):
    """Tiles from ``whole`` on are cut into ``cut`` pieces each."""

    whole: int
    cut: int

    @property
    def inverse(self) -> int:
        """2^32 over ``cut``, rounded up: for division of numbers far below."""
        return ((1 << 32) - 1) // self.cut + 1 & (1 << 32) - 1


NO_TAIL = Tail((1 << 31) - 1, 1)


def may_be_cut(tile: Fp8Tile) -> bool:
    """What is compiled with ``kTail``: the widest tiles spill, the smallest are slower for it."""
    return not tile.columns and tile.head_dim * tile.rows > 64 * 128


def choose_tail(
    problem: AttentionProblem, info: DeviceInfo, tile: Fp8Tile, tiles: int, tokens: int, limit: int
) -> Tail:
    """The pieces with which a device is done first, from bounds alone.

    Parameters
    ----------
    problem : AttentionProblem
        Its requests have as many queries as its bounds.
    info : DeviceInfo
    tile : Fp8Tile
    tiles : int
        Of ``tokens`` queries each.
    limit : int
        Bytes of scratch memory.
    """
    keys, count = _fewest_keys(problem, tokens), info.num_sms
    rounds, left = divmod(tiles, count)
    alike = keys >= _ALIKE * visible_keys(problem, tokens)
    if not may_be_cut(tile) or not alike or not rounds or not left:
        return NO_TAIL
    best, found = _WORTH * (rounds + 1) * keys, NO_TAIL
    most = min(_MOST_PIECES, keys // _SMALLEST_PIECE, _ROUNDS * count // left)
    warps = tile.rows // 16
    for cut in range(2, most + 1):
        piece = -(-keys // (cut * tile.keys)) * tile.keys + _PIECE_COST
        time = rounds * keys + -(-left * cut // count) * piece + cut * _MERGE_COST
        needed = tail_bytes(tile, left * cut) + left * cut * 4  # a link each
        fits = left * warps < COUNTERS and needed <= limit
        if time < best and fits:
            best, found = time, Tail(tiles - left, cut)
    return found


def _fewest_keys(problem: AttentionProblem, tokens: int) -> int:
    """That a tile of a request of the bounds' lengths sees."""
    left, right, keys = problem.window_left, problem.window_right, problem.max_seqlen_k
    first = keys - problem.max_seqlen_q  # the position of the first query among the keys
    begin = 0 if left < 0 else max(0, first - left)
    end = keys if right < 0 else min(keys, max(0, first + tokens + right))
    at_the_end = keys if left < 0 else min(keys, left + tokens)
    return min(end - begin, at_the_end)


def tail_bytes(tile: Fp8Tile, pieces: int) -> int:
    """What so many pieces leave each other: float32 sums and, a row, states of four lanes."""
    return pieces * tile.rows * (tile.head_dim + 8) * 4


def largest_tail_bytes(tile: Fp8Tile, info: DeviceInfo) -> int:
    """Of any call."""
    return tail_bytes(tile, _ROUNDS * info.num_sms)
