"""Query heads of all ranks side by side, ordered so that each meets its KV head.

A rank has ``Hq`` query heads over ``Hk`` KV heads, ``g = Hq / Hk`` each; all ranks have the same KV
heads. Gathered, head ``(kv head, rank, j)`` stands at ``(kv * ranks + rank) * g + j``, so the usual
rule of grouped heads holds for all ``ranks * Hq`` of them. Where a rank has all heads of some KV
heads instead, they stand in order already: that is ``num_kv_heads=1`` here, and of one token
nothing is moved.
"""

from __future__ import annotations

from typing import Any

from cupyflash.runtime.arrays import array_module

__all__ = ["gather_heads", "lse_by_rank", "out_by_rank", "own_lse", "own_out"]

Array = Any  # NumPy or CuPy


def gather_heads(gathered: Array, num_kv_heads: int) -> Array:
    """Queries of all ranks [ranks, tokens, Hq, D] as one array [tokens, ranks * Hq, D]."""
    ranks, tokens, heads, dim = gathered.shape
    split = gathered.reshape(ranks, tokens, num_kv_heads, heads // num_kv_heads, dim)
    return split.transpose(1, 2, 0, 3, 4).reshape(tokens, ranks * heads, dim)


def out_by_rank(out: Array, ranks: int, num_kv_heads: int) -> Array:
    """Outputs [tokens, ranks * Hq, D] sorted by the rank that asked: [ranks, tokens, Hq, D]."""
    tokens, heads, dim = out.shape
    split = out.reshape(tokens, num_kv_heads, ranks, -1, dim).transpose(2, 0, 1, 3, 4)
    return array_module(out).ascontiguousarray(split).reshape(ranks, tokens, heads // ranks, dim)


def lse_by_rank(lse: Array, ranks: int, num_kv_heads: int) -> Array:
    """LSEs [ranks * Hq, tokens] sorted by the rank that asked: [ranks, Hq, tokens]."""
    heads, tokens = lse.shape
    split = lse.reshape(num_kv_heads, ranks, -1, tokens).transpose(1, 0, 2, 3)
    return array_module(lse).ascontiguousarray(split).reshape(ranks, heads // ranks, tokens)


def own_out(out: Array, rank: int, ranks: int, num_kv_heads: int) -> Array:
    """Of outputs [tokens, ranks * Hq, D] those of a rank's heads, a view where one will do."""
    tokens, heads, dim = out.shape
    split = out.reshape(tokens, num_kv_heads, ranks, -1, dim)
    return split[:, :, rank].reshape(tokens, heads // ranks, dim)


def own_lse(lse: Array, rank: int, ranks: int, num_kv_heads: int) -> Array:
    """Of LSEs [ranks * Hq, tokens] those of a rank's heads, a view where one will do."""
    heads, tokens = lse.shape
    return lse.reshape(num_kv_heads, ranks, -1, tokens)[:, rank].reshape(heads // ranks, tokens)
