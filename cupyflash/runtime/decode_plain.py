"""Which decode calls are plain, as block/decode_plain.cuh says."""

from __future__ import annotations

from .decode_tile import DecodeTile
from .problem import AttentionProblem

__all__ = ["is_plain"]


def is_plain(problem: AttentionProblem, tile: DecodeTile) -> bool:
    """Whether it is what a plain kernel knows of a problem whose boxes have whole rows."""
    paged = problem.page_size is not None and not problem.page_size & (problem.page_size - 1)
    modified = problem.softcap or problem.has_alibi or problem.has_sink
    return bool(
        paged
        and not (modified or problem.batch_invariant)
        and problem.window_left < 0
        and problem.head_dim == problem.head_dim_v == tile.head_dim
        and (problem.out_type == tile.compute or problem.kv_type.is_fp8)
    )
