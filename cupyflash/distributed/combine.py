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
    xp = array_module(out)
    lse = xp.where(xp.isinf(lse), np.float32(-np.inf), lse)
    lses = group.all_gather(lse)
    top = lses.max(axis=0)
    shift = xp.where(xp.isinf(top), np.float32(0), top)
    sums = xp.exp(lses - shift).sum(axis=0)
    total = xp.where(sums > 0, shift + xp.log(xp.maximum(sums, np.float32(1e-45))), -np.inf)
    weight = xp.where(xp.isinf(lse), np.float32(0), xp.exp(lse - xp.where(sums > 0, total, 0)))
    weight = weight.astype(np.float32).T[..., None]
    # What an empty state holds may be anything, NaN too: it is dropped, not multiplied by 0.
    scaled = xp.where(weight == 0, np.float32(0), out.astype(np.float32)) * weight
    own = group.reduce_scatter(out_by_rank(scaled, group.size, num_kv_heads))
    mine = lse_by_rank(total.astype(np.float32), group.size, num_kv_heads)[group.rank]
    return own.astype(out.dtype, copy=False), mine
