"""Which query rows are computed together, and which keys they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash.runtime.problem import AttentionProblem

from .convert import Array

__all__ = [
    "Tiles", "group_tiles", "key_block", "keys_before", "make_tiles", "read_lengths", "tile_rows",
]  # fmt: skip

# Measured on two cores: smaller steps lose time to Python, larger ones fall out of the cache.
_SCORES_PER_STEP = 1 << 20
_KEY_BLOCK = 512
_KEY_BLOCK_SHORT = 256
_SHORT = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """Runs of consecutive query rows of one request each; int64 arrays [n].

    ``position`` is the absolute position of the first row in its sequence: ``Sk - Sq + i``, so it
    is negative where a row comes before the first key. A tile reads the keys ``kv_begin`` up to
    ``kv_end`` of its sequence, or of the share of it that this rank has: all that its rows see.
    """

    rows: int
    first_row: Array
    request: Array
    position: Array
    kv_begin: Array
    kv_end: Array

    def __len__(self) -> int:
        return len(self.request)

    @property
    def key_block(self) -> int:
        """Keys of one step."""
        return key_block(self.rows)

    def longest_first(self) -> Tiles:
        return self[np.argsort(self.kv_begin - self.kv_end, kind="stable")]

    def __getitem__(self, part: slice | Array) -> Tiles:
        return Tiles(
            self.rows,
            self.first_row[part],
            self.request[part],
            self.position[part],
            self.kv_begin[part],
            self.kv_end[part],
        )


def read_lengths(
    problem: AttentionProblem,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    seqused_k: Array | None,
    total_k: int,
) -> tuple[Array, Array, Array]:
    """The starts of the queries [batch + 1], the starts of packed keys and the key counts [batch].

    Raises
    ------
    ValueError
        Lengths that are negative or point outside of the arrays.
    """
    starts_q = cu_seqlens_q.astype(np.int64)
    _check_starts("cu_seqlens_q", starts_q, problem.total_q, "q")
    if problem.page_size is None:
        assert cu_seqlens_k is not None
        starts_k = cu_seqlens_k.astype(np.int64)
        _check_starts("cu_seqlens_k", starts_k, total_k, "k")
        room = np.diff(starts_k)
    else:
        starts_k = np.zeros(problem.batch + 1, np.int64)
        room = np.full(problem.batch, problem.max_blocks * problem.page_size, np.int64)
    lengths = room if seqused_k is None else seqused_k.astype(np.int64)
    bad = (lengths < 0) | (lengths > room)
    if bad.any():
        request = int(bad.argmax())
        raise ValueError(
            f"seqused_k[{request}]={lengths[request]} must lie in 0..{room[request]}, the keys "
            f"that request {request} has {'room for in block_table' if problem.page_size else ''}"
        )
    return starts_q, starts_k, lengths


def _check_starts(name: str, starts: Array, total: int, operand: str) -> None:
    if len(starts) and (starts[0] < 0 or (np.diff(starts) < 0).any() or starts[-1] > total):
        raise ValueError(
            f"{name}={starts.tolist()[:16]} must not be negative, must not fall, and must end "
            f"at most at {total}, the rows of {operand}"
        )


def tile_rows(problem: AttentionProblem) -> int:
    """Rows of a full tile."""
    height = _SCORES_PER_STEP // (problem.num_heads_q * _KEY_BLOCK) // _SHORT * _SHORT
    return max(_SHORT, min(256, height))


def key_block(rows: int) -> int:
    """Keys of one step; few rows leave the converted keys as the larger part of the data."""
    return _KEY_BLOCK_SHORT if rows <= _SHORT else _KEY_BLOCK


def keys_before(problem: AttentionProblem, position: Array) -> Array:
    """How many keys of this rank's share lie in front of a position of the whole sequence."""
    before: Array = -(-(position - problem.cp_rank) // problem.cp_world_size)
    return before


def make_tiles(
    problem: AttentionProblem, starts_q: Array, k_lengths: Array, total_lengths: Array
) -> list[Tiles]:
    """Cut every request's rows into tiles; one entry per tile height, longest key range first.

    The height depends on the head count alone, never on the batch, so a request's bits do not
    depend on its neighbours.
    """
    height = tile_rows(problem)
    q_lengths = np.diff(starts_q)
    counts = -(-q_lengths // height)
    request = np.repeat(np.arange(problem.batch), counts)
    index = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * height
    rows = np.minimum(height, q_lengths[request] - first)
    position = total_lengths[request] - q_lengths[request] + first
    begin, end = np.zeros_like(position), k_lengths[request]
    if problem.window_left >= 0:
        begin = np.clip(keys_before(problem, position - problem.window_left), 0, end)
    # Keys behind the whole sequence's end are nobody's, whatever the share's length says.
    last = total_lengths[request]
    if problem.window_right >= 0:
        last = np.minimum(last, position + rows + problem.window_right)
    end = np.maximum(begin, np.minimum(end, keys_before(problem, last)))
    columns = (starts_q[request] + first, request, position, begin, end)
    return [
        Tiles(int(same), *(column[rows == same] for column in columns)).longest_first()
        for same in np.unique(rows)
    ]


def group_tiles(problem: AttentionProblem, tiles: Tiles) -> Iterator[Tiles]:
    """Tiles of one height in stacks whose step stays within the memory of ``_SCORES_PER_STEP``."""
    width = problem.head_dim + problem.head_dim_v
    per_tile = tiles.key_block * max(problem.num_heads_q * tiles.rows, problem.num_heads_kv * width)
    stack = max(1, _SCORES_PER_STEP // per_tile)
    for start in range(0, len(tiles), stack):
        yield tiles[start : start + stack]
