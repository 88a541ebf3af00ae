"""What only a read can tell: lengths, bounds, table entries and slots.

NumPy arrays are always checked. Reading a GPU's arrays waits for it, so there it is done under
``CUPYFLASH_CHECK=1`` only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cpu.cache import check_slots
from .cpu.keys import KeyValue
from .cpu.tiles import read_lengths
from .runtime.arrays import AttentionArrays
from .runtime.call import Call
from .runtime.problem import AttentionProblem

__all__ = [
    "check_bounds",
    "check_prefix_is_seen",
    "check_shared_blocks",
    "check_slot_values",
    "check_values",
]


def check_shared_blocks(nodes: Any, block_size: int | None) -> None:
    """Refuse groups of a tree that share a part of a block; kernels go by whole ones.

    Raises
    ------
    ValueError
    """
    found = _read(nodes)
    ends = found[..., 1][found[..., 0] != 0]
    parts = ends[ends % block_size != 0] if block_size else ends[:0]
    if parts.size:
        raise ValueError(
            f"prefix_tree: a group shares {parts[0]} tokens, no multiple of the block size "
            f"{block_size}; the nearest is {parts[0] // block_size * block_size}"
        )


def check_values(call: Call) -> None:
    """Read the lengths and the table of a call, and refuse those that point outside of arrays.

    Raises
    ------
    ValueError
        A length, an entry, or a bound that is too small.
    """
    problem, arrays = call.problem, call.arrays
    small = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
    read = arrays._replace(**{name: _read(getattr(arrays, name)) for name in small})
    starts_q, starts_k, lengths = _lengths(problem, read)
    KeyValue(problem, arrays.k, arrays.v, starts_k, read.block_table).check(
        starts_q, lengths, lengths
    )
    check_bounds(call._replace(arrays=read))


def check_bounds(call: Call) -> None:
    """Refuse lengths above ``max_seqlen_*``; the lengths are NumPy arrays.

    Raises
    ------
    ValueError
        A request is longer than the bound that the call gives.
    """
    problem, arrays = call.problem, call.arrays
    queries = np.diff(arrays.cu_seqlens_q)
    keys = np.diff(arrays.cu_seqlens_k) if arrays.seqused_k is None else arrays.seqused_k
    for name, bound, lengths in (
        ("max_seqlen_q", problem.max_seqlen_q, queries),
        ("max_seqlen_k", problem.max_seqlen_k, keys),
    ):
        if lengths.size and lengths.max() > bound:
            _lengths(problem, arrays)  # a length that no array has room for is the worse error
            raise ValueError(
                f"{name}={bound}, but request {int(lengths.argmax())} has {lengths.max()}; it must "
                f"be at least {lengths.max()}"
            )


def _lengths(problem: AttentionProblem, arrays: AttentionArrays) -> tuple[Any, Any, Any]:
    total_k = arrays.k.shape[0] if problem.page_size is None else 0
    return read_lengths(
        problem, arrays.cu_seqlens_q, arrays.cu_seqlens_k, arrays.seqused_k, total_k
    )


def check_prefix_is_seen(call: Call, prefix: int) -> None:
    """Refuse queries in front of the end of a shared prefix; ``call`` is of the keys behind it.

    Raises
    ------
    ValueError
        A request whose first query lies in the prefix.
    """
    queries = np.diff(_read(call.arrays.cu_seqlens_q)).astype(np.int64)
    hidden = queries - 1 - _read(call.arrays.seqused_k)
    if hidden.size and hidden.max() > 0 and queries[hidden.argmax()] > 0:
        request = int(hidden.argmax())
        raise ValueError(
            f"common_prefix_len={prefix}, but the first of {queries[request]} queries of request "
            f"{request} does not see its last {hidden[request]} keys; share at most "
            f"{prefix - hidden[request]}"
        )


def check_slot_values(slot_mapping: Any, num_blocks: int, block_size: int) -> None:
    """Read the slots and refuse those past the end of the cache.

    Raises
    ------
    ValueError
        Such a slot.
    """
    check_slots(_read(slot_mapping).astype(np.int64), num_blocks, block_size)


def _read(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array
