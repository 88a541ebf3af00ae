"""What work costs a Hopper multiprocessor, for launches that share a GPU."""

from __future__ import annotations

from .problem import AttentionProblem

__all__ = ["ALONE", "beside_prefill"]

# Of one multiprocessor, a nanosecond: FLOPs of the prefill kernels; bytes of the decode kernel,
# fewer than it reads: with too few multiprocessors the end is late by more than with too many.
_PREFILL_FLOPS, _PREFILL_FLOPS_8_BIT = 4900.0, 5400.0
_DECODE_BYTES, _DECODE_BYTES_PLAIN = 27.0, 34.0
_MEMORY_BYTES = 4400.0  # of the whole GPU

ALONE = (0.0, 0.0, 0.0)
"""Of a launch that shares the GPU with no other."""


def beside_prefill(
    problem: AttentionProblem, tile_bytes: int, plain: bool
) -> tuple[float, float, float]:
    """What a decode launch weighs to find how many multiprocessors it takes.

    Parameters
    ----------
    problem : AttentionProblem
    tile_bytes : int
        Of keys and values.
    plain : bool
        Whether the decode kernel is that of plain calls.

    Returns
    -------
    tile_time, tile_floor, pair_time : float
        Nanoseconds: of one multiprocessor for a tile; of the memory for it; of one multiprocessor
        of the prefill launch for one query with one key, all heads.
    """
    flops = 2 * problem.num_heads_q * (problem.head_dim + problem.head_dim_v)
    rate = _PREFILL_FLOPS_8_BIT if problem.q_type.is_fp8 else _PREFILL_FLOPS
    decode = _DECODE_BYTES_PLAIN if plain else _DECODE_BYTES
    return tile_bytes / decode, tile_bytes / _MEMORY_BYTES, flops / rate
