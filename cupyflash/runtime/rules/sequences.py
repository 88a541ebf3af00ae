"""Lengths and tables of the requests: int32, one entry a request, the right ones for K."""

from __future__ import annotations

import numpy as np

from cupyflash.runtime.arrays import ArraySpec

__all__ = ["check_lengths", "check_sequences"]


def check_sequences(
    cu_seqlens_q: ArraySpec | None,
    cu_seqlens_k: ArraySpec | None,
    seqused_k: ArraySpec | None,
    block_table: ArraySpec | None,
) -> int:
    """The number of requests, once the four arrays fit each other."""
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q is None; it must be an int32 array [batch + 1]")
    _check_vector("cu_seqlens_q", cu_seqlens_q)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q has shape (0,); it must be [batch + 1], at least [0]")
    if block_table is not None:
        _check_paged(cu_seqlens_k, seqused_k, block_table, batch)
    elif cu_seqlens_k is None:
        raise ValueError(
            "cu_seqlens_k is missing: packed k and v need it, int32 [batch + 1]; a paged cache "
            "needs block_table and seqused_k"
        )
    else:
        _check_vector("cu_seqlens_k", cu_seqlens_k)
        _check_batch("cu_seqlens_k", cu_seqlens_k, batch, 1)
    if seqused_k is not None:
        _check_vector("seqused_k", seqused_k)
        _check_batch("seqused_k", seqused_k, batch, 0)
    return batch


def _check_paged(
    cu_seqlens_k: ArraySpec | None,
    seqused_k: ArraySpec | None,
    block_table: ArraySpec,
    batch: int,
) -> None:
    if seqused_k is None:
        raise ValueError(
            "block_table without seqused_k: pass the number of keys of each request, int32 [batch]"
        )
    if cu_seqlens_k is not None:
        raise ValueError("block_table and cu_seqlens_k exclude each other; drop cu_seqlens_k")
    if block_table.dtype != np.int32:
        raise TypeError(f"block_table is {block_table.dtype}; it must be int32")
    if len(block_table.shape) != 2:
        raise ValueError(
            f"block_table has shape {block_table.shape}; it must be [batch, max_blocks]"
        )
    if not block_table.unit_stride:
        raise ValueError("block_table must have contiguous rows; the row stride may be anything")
    if block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {block_table.shape}, but cu_seqlens_q holds {batch} requests; "
            f"it must be [{batch}, max_blocks]"
        )


def check_lengths(name: str, spec: ArraySpec | None, size: int) -> None:
    """Contiguous int32 [size]."""
    if spec is None:
        raise TypeError(f"{name} is None; it must be an int32 array [{size}]")
    _check_vector(name, spec)
    if spec.shape[0] != size:
        raise ValueError(f"{name} has shape {spec.shape}; it must be [{size}]")


def _check_vector(name: str, spec: ArraySpec) -> None:
    if spec.dtype != np.int32:
        raise TypeError(f"{name} is {spec.dtype}; it must be int32")
    if len(spec.shape) != 1:
        raise ValueError(f"{name} has shape {spec.shape}; it must have one dimension")
    if not spec.unit_stride:
        raise ValueError(f"{name} must be contiguous")


def _check_batch(name: str, spec: ArraySpec, batch: int, more: int) -> None:
    if spec.shape[0] != batch + more:
        raise ValueError(
            f"{name} has shape {spec.shape}, but cu_seqlens_q holds {batch} requests; it must be "
            f"[{batch + more}]"
        )
