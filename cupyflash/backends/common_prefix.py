"""The beginning that all requests of a step share, found in their block tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_common_prefix", "common_prefix_blocks", "common_prefix_len"]


def common_prefix_blocks(block_table: NDArray[Any], null_block: int | None = None) -> int:
    """How many leading blocks are the same in every row.

    Parameters
    ----------
    block_table : ndarray [requests, max_blocks], int32
        On the host, without padded requests.
    null_block : int, optional
        A block that stands for "no block"; never shared. Negative entries are none either.

    Returns
    -------
    int
        0 without requests.

    Raises
    ------
    TypeError
        The table is not a NumPy array: an engine knows its tables on the host.
    """
    if not isinstance(block_table, np.ndarray):
        raise TypeError(
            f"block_table is {type(block_table).__name__}; pass the engine's own copy, a NumPy "
            "array (reading one on a GPU would synchronise)"
        )
    if not len(block_table):
        return 0
    first = block_table[0]
    live = first >= 0
    if null_block is not None:
        live &= first != null_block
    same = live & (block_table == first).all(axis=0)
    return int(same.argmin()) if not same.all() else len(same)


def common_prefix_len(
    block_table: NDArray[Any],
    num_computed_tokens: NDArray[Any],
    block_size: int,
    null_block: int | None = None,
) -> int:
    """Tokens of a shared prefix that is worth handing to a builder.

    Whole blocks only, and none that holds a token of this step: so every query has a key of its
    own behind the prefix, and sees all of the prefix.

    Parameters
    ----------
    block_table : ndarray [requests, max_blocks], int32
        On the host, without padded requests; entries past the used ones may hold anything.
    num_computed_tokens : ndarray [requests]
        Keys that earlier steps wrote.
    block_size : int
    null_block : int, optional
        As `common_prefix_blocks`.

    Returns
    -------
    int
    """
    if not len(block_table):
        return 0
    written = int(np.min(num_computed_tokens)) // block_size
    return common_prefix_blocks(block_table[:, :written], null_block) * block_size


def check_common_prefix(
    prefix: int, query_lens: NDArray[Any], seq_lens: NDArray[Any], block_size: int
) -> None:
    """Refuse a shared prefix that some query would not see, or that is not whole blocks.

    Raises
    ------
    ValueError
        Says the longest that can be.
    """
    asking = query_lens > 0
    computed = (seq_lens - query_lens)[asking]
    # A query that is computed for the first time sees its own key, so its block is not shared.
    longest = int(computed.min()) // block_size * block_size if len(computed) else 0
    if prefix < 0 or prefix % block_size or prefix > longest:
        raise ValueError(
            f"common_prefix_len={prefix} must be whole blocks of {block_size} tokens that were "
            f"written before this step: a multiple from 0 to {longest}"
        )
