"""Whether reading a shared prefix once is worth it: vLLM's rule, and one that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "predict_microseconds",
    "prefix_features",
    "shared_prefix_pays",
    "use_cascade_attention",
]

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


class _Costs(NamedTuple):
    """Microseconds, fitted to runs on an H200; see docs/shared_prefix.md."""

    alone: float = 5.6  # plain decode: a launch
    alone_own: float = 0.196  # a megabyte that one request reads
    alone_shared: float = 0.107  # a megabyte that is in the L2 cache, as others read it too
    launch: float = 5.3
    own: float = 0.215  # a megabyte
    block: float = 1.01  # 64 shared keys against 128 rows, on one multiprocessor
    state: float = 0.00045  # a partial result of a row
    schedule: float = 5.5  # made in the launch, where it is not made ahead


_COSTS = _Costs()
_COSTS_8_BIT = _Costs(
    alone=6.4, alone_own=0.207, alone_shared=0.162, launch=8.0, own=0.289, block=0.84
)
_LEAST_GAIN, _LEAST_RATIO = 4.0, 0.15  # microseconds; of plain decode
_BLOCK_KEYS, _BLOCK_ROWS, _TILE_KEYS, _OWN_WARPS = 64, 128, 16, 4


class PrefixFeatures(NamedTuple):
    """What the time of a step is made of.

    Attributes
    ----------
    own : float
        Megabytes of keys that one request reads.
    read : float
        Megabytes of shared keys, once for each request.
    blocks : float
        Of 64 shared keys against 128 rows, a multiprocessor.
    states : int
        Partial results of rows.
    """

    own: float
    read: float
    blocks: float
    states: int


def prefix_features(
    common_prefix_len: int,
    query_lens: Sequence[int] | np.ndarray[Any, Any],
    seq_lens: Sequence[int] | np.ndarray[Any, Any],
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    num_sms: int = 132,
    cache_itemsize: int = 2,
) -> PrefixFeatures:
    """What `predict_microseconds` goes by; its parameters."""
    queries, keys = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    requests, total_own = len(queries), int(np.maximum(keys - common_prefix_len, 0).sum())
    megabyte = num_kv_heads * head_size * 2 * cache_itemsize / 1e6
    rows = int(queries.sum()) * (num_query_heads // num_kv_heads)
    items, blocks = num_kv_heads * -(-rows // _BLOCK_ROWS), -(-common_prefix_len // _BLOCK_KEYS)
    pieces = max(1, min(num_sms // max(1, items), blocks // 2)) if blocks else 0
    each = max(items * blocks / num_sms, blocks / pieces) if blocks else 0.0
    tiles = total_own / max(1, requests) / _TILE_KEYS
    spans = _OWN_WARPS * num_sms // max(1, requests * num_kv_heads)
    own_pieces = max(1, min(spans, int(tiles) // 4)) if total_own else 0
    states = rows * num_kv_heads * (own_pieces + pieces * (2 if rows <= _BLOCK_ROWS / 2 else 1))
    return PrefixFeatures(
        megabyte * total_own, megabyte * requests * common_prefix_len, each, states
    )


def predict_microseconds(
    common_prefix_len: int,
    query_lens: Sequence[int] | np.ndarray[Any, Any],
    seq_lens: Sequence[int] | np.ndarray[Any, Any],
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    num_sms: int = 132,
    scheduled: bool = True,
    cache_itemsize: int = 2,
) -> tuple[float, float]:
    """What attention of a step costs without and with its prefix read once, on an H200.

    Plain decode reads every key once a request, those of a prefix from the L2 cache. The kernel of
    shared prefixes reads each once; it multiplies the shared ones in blocks and merges partial
    results.

    Parameters
    ----------
    common_prefix_len : int
    query_lens, seq_lens : sequence of int
        Query tokens and keys of each request.
    num_query_heads, num_kv_heads, head_size : int
    num_sms : int
    scheduled : bool
        Whether the schedule is made once for many layers; see `get_prefix_schedule`.
    cache_itemsize : int
        Bytes of an element of the cache: 2 or 1.

    Returns
    -------
    alone, shared : float
        Microseconds.
    """
    c = _COSTS_8_BIT if cache_itemsize == 1 else _COSTS
    f = prefix_features(
        common_prefix_len, query_lens, seq_lens, num_query_heads, num_kv_heads, head_size,
        num_sms=num_sms, cache_itemsize=cache_itemsize,
    )  # fmt: skip
    alone = c.alone + c.alone_own * f.own + c.alone_shared * f.read
    shared = c.launch + c.own * f.own + c.block * f.blocks + c.state * f.states
    return alone, shared if scheduled else shared + c.schedule


def shared_prefix_pays(
    common_prefix_len: int,
    query_lens: Sequence[int] | np.ndarray[Any, Any],
    seq_lens: Sequence[int] | np.ndarray[Any, Any],
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    num_sms: int = 132,
    scheduled: bool = True,
    cache_itemsize: int = 2,
) -> bool:
    """Whether reading a shared prefix once is faster on compute capability 9.0, as measured.

    It has to win 4 microseconds and 15 % by `predict_microseconds`, which may be off by as much.

    Parameters
    ----------
    common_prefix_len, query_lens, seq_lens, num_query_heads, num_kv_heads, head_size
        As `predict_microseconds`.
    num_sms, scheduled, cache_itemsize
        As `predict_microseconds`.

    Returns
    -------
    bool
    """
    if common_prefix_len <= 0 or len(query_lens) < 2:
        return False
    alone, shared = predict_microseconds(
        common_prefix_len, query_lens, seq_lens, num_query_heads, num_kv_heads, head_size,
        num_sms=num_sms, scheduled=scheduled, cache_itemsize=cache_itemsize,
    )  # fmt: skip
    return alone - shared >= max(_LEAST_GAIN, _LEAST_RATIO * alone)
