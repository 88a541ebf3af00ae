"""Whether reading a shared prefix once is worth it: vLLM's rule, and one that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["use_cascade_attention"]

_TILE = 128  # rows and keys of a tile in the cost model of `use_cascade_attention`
_SHORTEST_PREFIX = 256
_FEWEST_REQUESTS = 8


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: Sequence[int] | np.ndarray[Any, Any],
    num_query_heads: int,
    num_kv_heads: int,
    use_alibi: bool,
    use_sliding_window: bool,
    use_local_attention: bool,
    num_sms: int,
    dcp_world_size: int,
) -> bool:
    """Whether vLLM 0.31 would compute a shared prefix once for the whole batch.

    The rule is that release's. There must be at least 256 shared tokens and 8 requests, and no
    ALiBi, window, local attention or context parallelism. Then the answer is yes, unless all
    requests decode one token with grouped heads: those run as split decode too, and the answer is
    whether cascade takes fewer waves of 128 x 128 tiles on `num_sms` multiprocessors.

    Parameters
    ----------
    common_prefix_len : int
        Tokens that all requests share.
    query_lens : sequence of int
        Query tokens of each request.
    num_query_heads, num_kv_heads : int
    use_alibi, use_sliding_window, use_local_attention : bool
    num_sms : int
        Multiprocessors of the GPU.
    dcp_world_size : int
        Ranks of the context-parallel group.

    Returns
    -------
    bool
    """
    requests = len(query_lens)
    if common_prefix_len < _SHORTEST_PREFIX or requests < _FEWEST_REQUESTS or dcp_world_size > 1:
        return False
    if use_alibi or use_sliding_window or use_local_attention:
        return False
    group = num_query_heads // num_kv_heads
    if group == 1 or any(n != 1 for n in query_lens):
        return True
    tiles = -(-common_prefix_len // _TILE)
    cascade = -(-num_query_heads * -(-requests // _TILE) // num_sms) * tiles
    decode = -(-requests * num_kv_heads * -(-group // _TILE) * tiles // num_sms)
    return cascade < decode
