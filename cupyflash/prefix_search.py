"""Requests whose block tables begin alike, found on the host or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .prefix_tree import PrefixTree, prefix_tree
from .runtime.arrays import place, spec_of
from .runtime.device import device_for
from .runtime.launch import stream_handle
from .runtime.placement import check_apart
from .runtime.prefix_search import Search, search_prefixes
from .runtime.rules.numbers import non_negative, token_bound
from .runtime.rules.sequences import check_lengths
from .runtime.shared_plan import MOST_SHARED_REQUESTS
from .runtime.shared_tile import MOST_LEVELS

__all__ = ["check_tables", "find_prefix_tree", "null_entry", "shared_groups", "tree_beside"]


def find_prefix_tree(
    block_table: Any,
    seqused_k: Any,
    block_size: int,
    cu_seqlens_q: Any = None,
    *,
    levels: int = MOST_LEVELS,
    null_block: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> PrefixTree:
    """Find out which requests share blocks; on a GPU without reading anything back.

    Requests whose first blocks are the same are a group, which shares as many as all of it have in
    common; inside of it those whose next blocks are the same are groups of the next level.

    Parameters
    ----------
    block_table : array [batch, max_blocks], int32
        Entries past the used ones may hold anything.
    seqused_k : array [batch], int32
        Keys of each request, those of this step included.
    block_size : int
    cu_seqlens_q : array [batch + 1], int32, optional
        Where each request's queries start; one query a request if None.
    levels : int
        1 to 3.
    null_block : int, optional
        A block that stands for "no block"; never shared. Negative entries are none either.
    out : array [(2 * levels + 1) * batch], int32, optional
        Where to put the tree, so that its address stays (CUDA graphs). New if None.
    stream : int or stream, optional
        The current stream of the arrays' device if None. The CPU has none.

    Returns
    -------
    PrefixTree
        Beside the table. Blocks with a token of this step are not shared.

    Raises
    ------
    TypeError
        Arrays of another dtype, or on the CPU and on a GPU.
    ValueError
        Arrays that do not fit each other, more levels than there are, more requests than a schedule
        takes.
    NotImplementedError
        On a GPU that is not of compute capability 9.0.
    """
    names = ("block_table", "seqused_k", "cu_seqlens_q", "out")
    (table, lengths, starts, out), on_host = place(
        names, (block_table, seqused_k, cu_seqlens_q, out), stream, required=2
    )
    check_tables(table, lengths, starts, block_size, levels, null_block)
    batch = table.shape[0]
    into = None if out is None else tree_beside(batch, levels, out, table, lengths, starts)
    if on_host:
        held = table.shape[1] * block_size
        if batch and not 0 <= lengths.min() <= lengths.max() <= held:
            raise ValueError(
                f"seqused_k is from {lengths.min()} to {lengths.max()}; a table of "
                f"{table.shape[1]} blocks of {block_size} holds 0 to {held}"
            )
        queries = np.ones(batch, np.int64) if starts is None else np.diff(starts)
        computed = np.where(queries > 0, lengths - queries, 0)
        groups = shared_groups(table, computed, block_size, levels=levels, null_block=null_block)
        return prefix_tree(groups, batch, levels=levels, out=out)
    device, given = device_for(table), stream_handle(stream)
    major, minor = device.info.capability
    if (major, minor) != (9, 0):
        raise NotImplementedError(
            f"prefixes are searched on GPUs of capability 9.0; this one is {major}.{minor}: "
            "pass NumPy arrays, or name the groups to prefix_tree()"
        )
    queue = device.current_stream() if given is None else given
    if into is None:
        size = (2 * levels + 1) * batch
        into = PrefixTree(batch, levels, device.empty((size,), np.dtype(np.int32), queue))
    search = Search(table, starts, lengths, block_size, null_entry(null_block), into.buffer, levels)
    search_prefixes(device, search, queue)
    return into


def tree_beside(batch: int, levels: int, out: Any, *read: Any) -> PrefixTree:
    """The tree in ``out``, which shares no memory with what is searched.

    Raises
    ------
    TypeError, ValueError
    """
    tree = PrefixTree(batch, levels, out)
    for name, array in zip(("block_table", "seqused_k", "cu_seqlens_q"), read, strict=True):
        if array is not None:
            check_apart(("the tree", name), tree.buffer, array)
    return tree


def check_tables(
    table: Any, lengths: Any, starts: Any, block_size: int, levels: int, null_block: int | None
) -> None:
    """Refuse arrays that `find_prefix_tree` does not take.

    Raises
    ------
    TypeError, ValueError
    """
    if table.dtype != np.int32 or table.ndim != 2 or table.strides[1] != 4:
        raise TypeError(
            f"block_table is {table.dtype} {table.shape}; it must be int32 [batch, max_blocks], "
            "its columns neighbours"
        )
    batch = table.shape[0]
    check_lengths("seqused_k", spec_of(lengths), batch)
    if starts is not None:
        check_lengths("cu_seqlens_q", spec_of(starts), batch + 1)
    null_entry(null_block)
    size, count = token_bound("block_size", block_size), non_negative("levels", levels)
    if size < 1 or not 1 <= count <= MOST_LEVELS:
        raise ValueError(
            f"block_size={block_size} must be at least 1, levels={levels} from 1 to {MOST_LEVELS}"
        )
    if batch > MOST_SHARED_REQUESTS:
        raise ValueError(f"{batch} requests; a schedule takes {MOST_SHARED_REQUESTS}")


def null_entry(null_block: int | None) -> int:
    """The block that is none, as kernels take it; -1 if there is no such block.

    Raises
    ------
    TypeError, ValueError
    """
    if null_block is None:
        return -1
    found = non_negative("null_block", max(null_block, 0))
    if found >= 1 << 31:
        raise ValueError(f"null_block={found}: entries of a block_table are int32")
    return found if null_block >= 0 else -1


def shared_groups(
    block_table: NDArray[Any],
    num_computed_tokens: NDArray[Any],
    block_size: int,
    *,
    levels: int = MOST_LEVELS,
    null_block: int | None = None,
) -> list[tuple[list[int], int]]:
    """Groups of requests with the same leading blocks, for `prefix_tree`.

    Requests whose first blocks are the same are a group, which shares as many as all of it have in
    common; inside of it those whose next blocks are the same are groups of the next level.

    Parameters
    ----------
    block_table : ndarray [requests, max_blocks], int32
        On the host; entries past the used ones may hold anything.
    num_computed_tokens : ndarray [requests]
        Keys that earlier steps wrote: blocks with a token of this step are not shared.
    block_size : int
    levels : int
    null_block : int, optional
        A block that stands for "no block"; never shared. Negative entries are none either.

    Returns
    -------
    list of (list of int, int)
        Requests, and how many tokens they share from the beginning on.

    Raises
    ------
    TypeError
        The table is not a NumPy array.
    """
    if not isinstance(block_table, np.ndarray):
        raise TypeError(f"block_table is {type(block_table).__name__}; pass a NumPy array")
    blocks = np.asarray(num_computed_tokens) // block_size
    found: list[tuple[list[int], int]] = []

    def split(rows: NDArray[Any], begin: int, level: int) -> None:
        rows = rows[blocks[rows] > begin]
        for first in np.unique(block_table[rows, begin]) if len(rows) > 1 else ():
            members = rows[block_table[rows, begin] == first]
            if len(members) < 2 or first < 0 or first == null_block:
                continue
            ahead = block_table[members, begin : int(blocks[members].min())]
            end = begin + _alike(ahead, null_block)
            found.append((members.tolist(), end * block_size))
            if level + 1 < levels:
                split(members, end, level + 1)

    split(np.arange(len(block_table)), 0, 0)
    return found


def _alike(rows: NDArray[Any], null_block: int | None) -> int:
    """Leading columns in which all rows hold the same real block."""
    same = (rows == rows[0]).all(axis=0) & (rows[0] >= 0) & (rows[0] != null_block)
    return int(same.argmin()) if not same.all() else rows.shape[1]
