"""States of the same queries over the keys of different ranks, merged where they were asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.merge import merge_attn_states
from cupyflash.runtime.arrays import array_module

from .communicator import Communicator
from .heads import lse_by_rank, out_by_rank

__all__ = ["COMBINE_METHODS", "combine_states"]

Array = Any  # NumPy or CuPy

COMBINE_METHODS = ("a2a", "ag_rs")
"""One all-to-all of outputs and LSEs, or an all-gather of LSEs and a reduce-scatter of outputs."""

_FEW = 8  # more states are merged in one sum: a dozen launches, however many they are


def combine_states(
    group: Communicator, out: Array, lse: Array, num_kv_heads: int, method: str = "a2a"
) -> tuple[Array, Array]:
    """The merged state of this rank's own heads.

    ``"a2a"`` moves outputs as they are and merges in float32 at the receiver; ``"ag_rs"`` weighs
    them at the sender and moves float32 sums.

    Parameters
    ----------
    group : Communicator
    out : array [tokens, ranks * Hq, D], float32, float16 or bfloat16
        Over this rank's keys, heads in the order of `gather_heads`.
    lse : array [ranks * Hq, tokens], float32
        -inf or +inf where this rank has no key for a row; its output may then hold anything.
    num_kv_heads : int
    method : {"a2a", "ag_rs"}

    Returns
    -------
    out : array [tokens, Hq, D]
        In the type of the given one.
    lse : array [Hq, tokens], float32
    """
    if method not in COMBINE_METHODS:
        raise ValueError(f"method={method!r}; use one of {', '.join(COMBINE_METHODS)}")
    if group.size == 1:
        return out, lse
    if method == "a2a":
        return _all_to_all(group, out, lse, num_kv_heads)
    return _reduce_scatter(group, out, lse, num_kv_heads)


def _all_to_all(
    group: Communicator, out: Array, lse: Array, num_kv_heads: int
) -> tuple[Array, Array]:
    outs, lses = group.all_to_all(
        [out_by_rank(out, group.size, num_kv_heads), lse_by_rank(lse, group.size, num_kv_heads)]
    )
    if group.size > _FEW:
        weight, total = _weights(lses)
        return _weighted(outs, weight).sum(axis=0).astype(out.dtype, copy=False), total
    xp, total = array_module(out), lses[0]
    # One merge rounds once. More of them are made in float32, so that they round once too.
    kept = outs if group.size == 2 else outs.astype(np.float32)
    merged = xp.empty_like(kept[0])
    merge_attn_states(merged, kept[0], lses[0], kept[1], lses[1], total)
    for part, own in zip(kept[2:], lses[2:], strict=True):
        merge_attn_states(merged, merged, total, part, own, total)
    return merged.astype(out.dtype, copy=False), total


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
