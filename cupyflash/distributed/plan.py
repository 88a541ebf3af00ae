"""What a step of context parallelism moves between ranks: arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .combine import combine_method

__all__ = ["Transfer", "step_bytes", "step_transfers"]

_LSE_BYTES = 4


class Transfer(NamedTuple):
    """One message of a collective, as if every pair of ranks spoke for itself.

    Attributes
    ----------
    what : str
    source, target : int
        Ranks.
    nbytes : int
    """

    what: str
    source: int
    target: int
    nbytes: int


def step_bytes(
    size: int, tokens: int, num_heads: int, head_dim_v: int, itemsize: int, combine: str,
    head_dim: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of each collective that a rank sends to each other rank, for one layer.

    Parameters
    ----------
    size : int
        Ranks.
    tokens : int
        Query tokens of the step.
    num_heads : int
        Query heads of one rank.
    head_dim_v, head_dim : int
        ``head_dim`` None = ``head_dim_v``.
    itemsize : int
        Bytes of a query's and an output's element.
    combine : {"auto", "a2a", "ag", "ag_rs"}
    """
    if size == 1:
        return {}
    rows = tokens * num_heads
    query = rows * (head_dim_v if head_dim is None else head_dim) * itemsize
    states = rows * (head_dim_v * itemsize + _LSE_BYTES)
    combine = combine_method(combine, size, size * states)
    if combine == "a2a":
        return {"all_gather q": query, "all_to_all": states}
    if combine == "ag":
        return {"all_gather q": query, "all_gather states": size * states}
    return {
        "all_gather q": query,
        "all_gather lse": size * rows * _LSE_BYTES,
        "reduce_scatter": rows * head_dim_v * 4,
    }


def step_transfers(
    size: int, tokens: int, num_heads: int, head_dim_v: int, itemsize: int, combine: str,
    head_dim: int | None = None,
) -> Iterator[Transfer]:  # fmt: skip
    """Every message of a step, for one layer; arguments as `step_bytes`."""
    moved = step_bytes(size, tokens, num_heads, head_dim_v, itemsize, combine, head_dim)
    for what, nbytes in moved.items():
        for source in range(size):
            for target in range(size):
                if source != target:
                    yield Transfer(what.partition(" ")[0], source, target, nbytes)
