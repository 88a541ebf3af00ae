"""What work costs a Hopper multiprocessor, for launches that share a GPU."""

from __future__ import annotations

from .problem import AttentionProblem

__all__ = ["ALONE", "beside_prefill"]

# Of one multiprocessor: bytes and FLOPs a nanosecond; and bytes a nanosecond of the whole memory.
_DECODE_BYTES, _PREFILL_FLOPS, _MEMORY_BYTES = 75.0, 5000.0, 4400.0

ALONE = (0.0, 0.0, 0.0)
"""Of a launch that shares the GPU with no other."""


def beside_prefill(problem: AttentionProblem, tile_bytes: int) -> tuple[float, float, float]:
    """What a decode launch weighs to find how many multiprocessors it takes.

    Parameters
    ----------
    problem : AttentionProblem
    tile_bytes : int
        Of keys and values.

    Returns
    -------
    tile_time, tile_floor, pair_time : float
        Nanoseconds: of one multiprocessor for a tile; of the memory for it; of one multiprocessor
        of the prefill launch for one query with one key, all heads.
    """
    flops = 2 * problem.num_heads_q * (problem.head_dim + problem.head_dim_v)
    return tile_bytes / _DECODE_BYTES, tile_bytes / _MEMORY_BYTES, flops / _PREFILL_FLOPS
