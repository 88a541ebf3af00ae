"""Decode context parallelism: how many of a request's keys lie on a rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.arrays import array_module

__all__ = ["get_dcp_local_seq_lens", "max_dcp_local_seq_len"]


def get_dcp_local_seq_lens(
    seq_lens: Any, dcp_world_size: int, dcp_rank: int | None = None, interleave_size: int = 1
) -> Any:
    """Keys of each request on one rank, or on every rank.

    Tokens are dealt in runs of ``interleave_size``: run ``n`` goes to rank
    ``n % dcp_world_size``.

    Parameters
    ----------
    seq_lens : array [...], int32
    dcp_world_size : int
    dcp_rank : int, optional
        None = all ranks.
    interleave_size : int

    Returns
    -------
    array [...], int32
        [..., dcp_world_size] for all ranks.
    """
    xp = array_module(seq_lens)
    rank = xp.arange(dcp_world_size, dtype=np.int32) if dcp_rank is None else np.int32(dcp_rank)
    lengths = seq_lens[..., None] if dcp_rank is None else seq_lens
    full = lengths // (interleave_size * dcp_world_size) * interleave_size
    rest = lengths - full * dcp_world_size - rank * interleave_size
    return (full + xp.clip(rest, 0, interleave_size)).astype(np.int32)


def max_dcp_local_seq_len(max_seq_len: int, dcp_world_size: int, interleave_size: int = 1) -> int:
    """A bound of any rank's share of any length up to ``max_seq_len``."""
    return -(-max_seq_len // (interleave_size * dcp_world_size)) * interleave_size
