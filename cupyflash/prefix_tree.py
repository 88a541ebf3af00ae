"""Which requests of a batch share leading keys, as the kernels of shared prefixes take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .runtime.arrays import as_array
from .runtime.rules.numbers import non_negative, token_bound
from .runtime.rules.prefix import check_tree
from .runtime.shared_tile import MOST_LEVELS

__all__ = ["PrefixTree", "prefix_tree"]

Group = tuple[Sequence[int], int]


@dataclass(frozen=True)
class PrefixTree:
    """Groups of requests, in up to three levels, each inside of one of the level before.

    Attributes
    ----------
    batch : int
    levels : int
    buffer : array [(2 * levels + 1) * batch], int32
        Of every level and place: the members of the group that begins there (0: in no group, -n: n
        places behind its first), and the key at which what it shares ends; then the request of each
        place. Beside the queries of a call. On a GPU it is not read back: every request has to have
        exactly one place, or rows are wrong.

    Raises
    ------
    TypeError, ValueError
        The buffer is not contiguous int32 of that size from a multiple of 8 bytes on, or there are
        more levels than a tree has.
    """

    batch: int
    levels: int
    buffer: Any

    def __post_init__(self) -> None:
        buffer = as_array(self.buffer, "buffer")
        check_tree(self.batch, self.levels, buffer)
        if not isinstance(self.buffer, np.ndarray):
            object.__setattr__(self, "buffer", buffer)

    @property
    def nodes(self) -> Any:
        """[levels, batch, 2]"""
        count = 2 * self.levels * self.batch
        return self.buffer[:count].reshape(self.levels, self.batch, 2)

    @property
    def order(self) -> Any:
        """[batch]"""
        return self.buffer[2 * self.levels * self.batch :]


def prefix_tree(
    groups: Iterable[Group], batch: int, *, levels: int | None = None, out: Any = None
) -> PrefixTree:
    """A tree from groups of requests that share their first keys.

    Parameters
    ----------
    groups : iterable of (sequence of int, int)
        Requests, and how many leading tokens they share: whole blocks. Groups are disjoint or one
        inside of the other; the inner one shares more.
    batch : int
        Requests of the batch. Those of no group read all of their keys by themselves.
    levels : int, optional
        Levels of the tree, at least those of the groups; a captured graph keeps their number.
    out : array [(2 * levels + 1) * batch], int32, optional
        Where to put it, NumPy's or on a GPU; a graph that was captured with it follows. New, on the
        host, if None.

    Returns
    -------
    PrefixTree

    Raises
    ------
    ValueError
        Groups that overlap, an index of no request, more levels than there are; what groups share
        is negative or too long; `out` is no buffer of a `PrefixTree`.

    Examples
    --------
    >>> tree = prefix_tree([([0, 1, 2, 3], 64), ([0, 2], 128)], 5)
    >>> tree.order
    array([0, 2, 1, 3, 4], dtype=int32)
    >>> tree.nodes[1]
    array([[  2, 128],
           [ -1, 128],
           [  0,   0],
           [  0,   0],
           [  0,   0]], dtype=int32)
    """
    chains = _chains(groups, non_negative("batch", batch))
    needed = max(1, max(map(len, chains), default=1))
    levels = needed if levels is None else non_negative("levels", levels)
    if needed > MOST_LEVELS:
        raise ValueError(f"groups of {needed} levels; a tree has 1 to {MOST_LEVELS}")
    if not needed <= levels <= MOST_LEVELS:
        raise ValueError(
            f"groups of {needed} levels, levels={levels}: a tree has {needed} to {MOST_LEVELS} here"
        )
    order = sorted(range(batch), key=lambda r: [-i for i, _ in chains[r]], reverse=True)
    host = np.zeros((2 * levels + 1) * batch, np.int32)
    tree = PrefixTree(batch, levels, host)
    tree.order[:] = order
    for level in range(levels):
        _fill(tree.nodes[level], [chains[r][level] if level < len(chains[r]) else None
                                  for r in order])  # fmt: skip
    if out is None:
        return tree
    into = PrefixTree(batch, levels, out)
    if isinstance(into.buffer, np.ndarray):
        into.buffer[...] = host
    else:
        into.buffer.set(host)
    return into


def _chains(groups: Iterable[Group], batch: int) -> list[list[tuple[int, int]]]:
    """The groups (number, keys) of each request, the outermost first."""
    chains: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    found = [
        (sorted({non_negative("request", r) for r in members}), token_bound("tokens", keys))
        for members, keys in groups
    ]
    found.sort(key=lambda group: (group[1], -len(group[0])))
    for number, (members, keys) in enumerate(found):
        if members and members[-1] >= batch:
            raise ValueError(f"group {members}: requests are 0 to {batch - 1}")
        parents = {tuple(chains[r][-1:]) for r in members}
        if len(parents) > 1:
            raise ValueError(
                f"group {members} with {keys} tokens overlaps another; groups are disjoint, or one "
                "is inside of the other"
            )
        outer = next(iter(parents), ())
        if keys <= 0 or (outer and keys <= outer[0][1]):
            continue  # it shares no more than the group around it
        for r in members:
            chains[r].append((number, keys))
    return chains


def _fill(nodes: NDArray[Any], groups: list[tuple[int, int] | None]) -> None:
    """One level: the group of each place, or None."""
    first = 0
    for place, group in enumerate(groups):
        if group is None:
            continue
        if place == 0 or groups[place - 1] != group:
            first = place
        nodes[place] = first - place, group[1]
        nodes[first, 0] += 1
