"""States of the same queries over the keys of different ranks, merged where they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash.merge import merge_attn_states
from cupyflash.runtime.arrays import array_module

from .communicator import Communicator
from .heads import lse_by_rank, out_by_rank
from .states import States

__all__ = [
    "COMBINE_METHODS",
    "combine_method",
    "combine_states",
    "combined",
    "exchange_states",
]

Array = Any  # NumPy or CuPy

COMBINE_METHODS = ("auto", "a2a", "ag", "ag_rs")
"""How states travel.

``a2a``: one all-to-all, each rank gets the outputs and LSEs of its own heads. ``ag``: one
all-gather of all heads' in one buffer, more bytes in one message. ``ag_rs``: an all-gather of LSEs
and a reduce-scatter of outputs. ``auto``: ``ag`` for few bytes between two ranks, else ``a2a``.
"""

_FEW = 8  # more states are merged in one sum: a dozen launches, however many they are
_SMALL_MESSAGE = 1 << 16  # bytes; up to here a message between two GPUs takes its latency


def combine_method(method: str, ranks: int, nbytes: int) -> str:
    """What ``method`` means for ``ranks`` that have ``nbytes`` of states each.

    Raises
    ------
    ValueError
        There is no such method.
    """
    if method not in COMBINE_METHODS:
        raise ValueError(f"method={method!r}; use one of {', '.join(COMBINE_METHODS)}")
    if method != "auto":
        return method
    return "ag" if ranks == 2 and nbytes <= _SMALL_MESSAGE else "a2a"


def combine_states(
    group: Communicator, out: Array, lse: Array, num_kv_heads: int, method: str = "auto"
) -> tuple[Array, Array]:
    """The merged state of this rank's own heads.

    ``"a2a"`` and ``"ag"`` move outputs as they are and merge in float32 at the receiver;
    ``"ag_rs"`` weighs them at the sender and moves float32 sums.

    Parameters
    ----------
    group : Communicator
    out : array [tokens, ranks * Hq, D], float32, float16 or bfloat16
        Over this rank's keys, heads in the order of `gather_heads`.
    lse : array [ranks * Hq, tokens], float32
        -inf or +inf where this rank has no key for a row; its output may then hold anything.
    num_kv_heads : int
    method : {"auto", "a2a", "ag", "ag_rs"}
        See ``COMBINE_METHODS``.

    Returns
    -------
    out : array [tokens, Hq, D]
        In the type of the given one.
    lse : array [Hq, tokens], float32

    Raises
    ------
    ValueError
        There is no such method.
    """
    method = combine_method(method, group.size, out.nbytes + lse.nbytes)
    if group.size == 1:
        return out, lse
    states = States.of(out, lse) if method == "ag" else States(None, out, lse)
    return combined(group, states, num_kv_heads, method)


def combined(
    group: Communicator, states: States, num_kv_heads: int, method: str
) -> tuple[Array, Array]:
    """As `combine_states`, by a method that `combine_method` returned."""
    if method == "ag_rs":
        return _reduce_scatter(group, states.out, states.lse, num_kv_heads)
    outs, lses = exchange_states(group, states, num_kv_heads, method)
    return _merged(outs, lses, states.out.dtype)


def exchange_states(
    group: Communicator, states: States, num_kv_heads: int, method: str
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Outputs and LSEs of this rank's heads over each rank's keys, by all-to-all or all-gather."""
    ranks, shape = group.size, states.out.shape
    if method == "a2a":
        outs, lses = group.all_to_all(
            [
                out_by_rank(states.out, ranks, num_kv_heads),
                lse_by_rank(states.lse, ranks, num_kv_heads),
            ]
        )
        return outs, lses
    found = group.all_gather(states.buffer)
    parts = [
        States.over(buffer, shape, states.out.dtype).asked_by(group.rank, ranks, num_kv_heads)
        for buffer in found
    ]
    return [out for out, _ in parts], [lse for _, lse in parts]


def _merged(
    outs: Sequence[Array], lses: Sequence[Array], dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    xp = array_module(outs[0])
    if len(outs) > _FEW:
        if isinstance(outs, list):
            outs, lses = xp.stack(outs), xp.stack(lses)
        weight, total = _weights(lses)
        return _weighted(outs, weight).sum(axis=0).astype(dtype, copy=False), total
    # One merge rounds once. More of them are made in float32, so that they round once too.
    kept = outs if len(outs) == 2 else [out.astype(np.float32) for out in outs]
    merged, total = xp.empty(kept[0].shape, kept[0].dtype), xp.empty(lses[0].shape, np.float32)
    merge_attn_states(merged, kept[0], lses[0], kept[1], lses[1], total)
    for part, own in zip(kept[2:], lses[2:], strict=True):
        merge_attn_states(merged, merged, total, part, own, total)
    return merged.astype(dtype, copy=False), total


def _reduce_scatter(
    group: Communicator, out: Array, lse: Array, num_kv_heads: int
) -> tuple[Array, Array]:
    weight, total = _weights(group.all_gather(lse))
    scaled = _weighted(out, weight[group.rank])
    own = group.reduce_scatter(out_by_rank(scaled, group.size, num_kv_heads))
    mine = lse_by_rank(total, group.size, num_kv_heads)[group.rank]
    return own.astype(out.dtype, copy=False), mine


def _weights(lses: Array) -> tuple[Array, Array]:
    """The share of each state [ranks, Hq, tokens] in the whole, and the whole's LSE, float32."""
    xp = array_module(lses)
    lses = xp.where(xp.isinf(lses), np.float32(-np.inf), lses)
    top = lses.max(axis=0)
    shift = xp.where(xp.isinf(top), np.float32(0), top)
    shares = xp.exp(lses - shift)
    total = shares.sum(axis=0)
    safe = xp.where(total == 0, np.float32(1), total)
    whole = xp.where(total == 0, np.float32(-np.inf), shift + xp.log(safe))
    return shares / safe, whole


def _weighted(out: Array, weight: Array) -> Array:
    """Outputs [..., tokens, Hq, D] times weights [..., Hq, tokens], in float32.

    What an empty state holds may be anything, NaN too: it is dropped, not multiplied by 0.
    """
    xp, weight = array_module(out), weight.swapaxes(-1, -2)[..., None]
    return xp.where(weight == 0, np.float32(0), out.astype(np.float32)) * weight
