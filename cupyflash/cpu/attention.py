"""Attention on NumPy arrays: blocked online softmax with float32 accumulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.problem import AttentionProblem

from .convert import Array, per_head, widen
from .keys import KeyValue
from .tiles import Tiles, group_tiles, make_tiles, read_lengths

__all__ = ["attention"]

_NARROWEST = 16


def attention(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    seqused_k: Array | None,
    block_table: Array | None,
    q_v: Array | None,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    s_aux: Array | None,
    alibi_slopes: Array | None,
    out: Array,
    lse: Array | None,
    total_lengths: Array | None = None,
) -> None:
    """Write the attention of every request to ``out`` and ``lse``; arguments are validated.

    Parameters
    ----------
    problem : AttentionProblem
    q : ndarray [total_q, num_heads_q, head_dim]
    k, v : ndarray
        Packed [total_k, num_heads_kv, head_dim(_v)], or paged
        [num_blocks, page_size, num_heads_kv, head_dim(_v)] with ``block_table``.
    cu_seqlens_q, cu_seqlens_k : ndarray [batch + 1], integer
    seqused_k : ndarray [batch], integer
    block_table : ndarray [batch, max_blocks], integer
    q_v : ndarray [total_q, num_heads_q, head_dim_v]
    q_descale, k_descale, v_descale : None, scalar or ndarray [batch, num_heads_kv]
    s_aux : ndarray [num_heads_q]
    alibi_slopes : ndarray [num_heads_q] or [batch, num_heads_q]
    out : ndarray [total_q, num_heads_q, head_dim_v]
    lse : ndarray [num_heads_q, total_q], float32
    total_lengths : ndarray [batch], int64
        Keys of each sequence on all ranks, where k and v are one rank's share.

    Raises
    ------
    ValueError
        Lengths or table entries that point outside of the arrays; nothing is written.
    """
    total_k = k.shape[0] if problem.page_size is None else 0
    starts_q, starts_k, k_lengths = read_lengths(
        problem, cu_seqlens_q, cu_seqlens_k, seqused_k, total_k
    )
    kv = KeyValue(problem, k, v, starts_k, block_table)
    whole = k_lengths if total_lengths is None else total_lengths
    kv.check(starts_q, k_lengths, whole)
    rows = _RowArguments(problem, q, q_v, q_descale, k_descale, v_descale, s_aux, alibi_slopes)
    with np.errstate(all="ignore"):
        for same_height in make_tiles(problem, starts_q, k_lengths, whole):
            for stack in group_tiles(problem, same_height):
                _attend(problem, stack, rows, kv, out, lse)


class _RowArguments:
    """What a query row brings along: its scaled values, slope, sink and output scale."""

    def __init__(
        self,
        problem: AttentionProblem,
        q: Array,
        q_v: Array | None,
        q_descale: Any,
        k_descale: Any,
        v_descale: Any,
        s_aux: Array | None,
        alibi_slopes: Array | None,
    ) -> None:
        self.problem, self.q, self.q_v = problem, q, q_v
        heads = (problem.num_heads_kv, problem.group_size)
        shape = (problem.batch, problem.num_heads_kv)
        scale = np.full(shape, problem.softmax_scale, np.float64)
        for descale in (per_head(q_descale, *shape), per_head(k_descale, *shape)):
            scale = scale if descale is None else scale * descale
        self.scale = scale.astype(np.float32)
        self.v_descale = per_head(v_descale, *shape)
        # A sink is one state, so one rank has it.
        sinks = None if problem.cp_rank else s_aux
        self.sink = None if sinks is None else sinks.astype(np.float32).reshape(heads)
        self.slopes: Array | None = None
        if alibi_slopes is not None:
            slopes = np.broadcast_to(alibi_slopes, (problem.batch, problem.num_heads_q))
            self.slopes = slopes.astype(np.float32).reshape(problem.batch, *heads)

    def queries(self, tiles: Tiles) -> Array:
        """Queries times scale: [tiles, num_heads_kv, group * rows, head_dim], rows innermost.

        The descales of q and k are part of the scale.
        """
        return self._scaled(self.q, tiles)

    def latent_queries(self, tiles: Tiles) -> Array | None:
        """The same of the parts that meet v, [..., head_dim_v]; None without."""
        return None if self.q_v is None else self._scaled(self.q_v, tiles)

    def _scaled(self, q: Array, tiles: Tiles) -> Array:
        p, dim = self.problem, q.shape[2]
        q = widen(q[_rows(tiles)], p.q_type)
        q = q.reshape(len(tiles), tiles.rows, p.num_heads_kv, p.group_size, dim)
        scaled: Array = q.transpose(0, 2, 3, 1, 4) * self.scale[tiles.request, :, None, None, None]
        return scaled.reshape(len(tiles), p.num_heads_kv, -1, dim)


def _rows(tiles: Tiles) -> Array:
    return (tiles.first_row[:, None] + np.arange(tiles.rows)).reshape(-1)


def _attend(
    problem: AttentionProblem,
    tiles: Tiles,
    rows: _RowArguments,
    kv: KeyValue,
    out: Array,
    lse: Array | None,
) -> None:
    """One stack of tiles, longest first, from its first key block to the output."""
    q, q_v = rows.queries(tiles), rows.latent_queries(tiles)
    top = np.full(q.shape[:3], -np.inf, np.float32)
    total = np.zeros(q.shape[:3], np.float32)
    acc = np.zeros((*q.shape[:3], problem.head_dim_v), np.float32)
    for step in range(0, int((tiles.kv_end - tiles.kv_begin)[0]), tiles.key_block):
        left = tiles.kv_end - tiles.kv_begin - step
        widths = _widths(left, tiles.key_block)
        for width in np.unique(widths[left > 0]):
            same = np.flatnonzero((widths == width) & (left > 0))
            part = slice(int(same[0]), int(same[-1]) + 1)
            some = tiles[part]
            begin = some.kv_begin + step
            k, v = kv.block(some, begin, int(width))
            scores = np.matmul(q[part], k)
            if q_v is not None:
                scores += np.matmul(q_v[part], v.swapaxes(-1, -2))
            _modify(problem, some, rows, begin, scores)
            _accumulate(scores, v, top[part], total[part], acc[part])
    _finish(problem, tiles, rows, (top, total, acc), out, lse)


def _widths(left: Array, key_block: int) -> Array:
    """Keys of this step, rounded up to a power of two.

    A tile's width follows from its own length alone, so it meets the same matrix shapes, and gets
    the same bits, alone and among others.
    """
    clipped = np.clip(left, _NARROWEST, key_block)
    widths: Array = np.left_shift(1, np.ceil(np.log2(clipped)).astype(np.int64))
    return widths


def _modify(
    problem: AttentionProblem, tiles: Tiles, rows: _RowArguments, begin: Array, scores: Array
) -> None:
    """Soft cap, then ALiBi, then the mask, in place on scores that carry the softmax scale."""
    if problem.softcap > 0:
        cap = np.float32(problem.softcap)
        scores /= cap
        np.tanh(scores, out=scores)
        scores *= cap
    width = scores.shape[-1]
    every, rank = problem.cp_world_size, problem.cp_rank
    place = begin * every + rank  # of the first key in the whole sequence
    last = place + (width - 1) * every
    left, right = problem.window_left, problem.window_right
    cut = begin + width > tiles.kv_end
    if left >= 0:
        cut = cut | (place < tiles.position + tiles.rows - 1 - left)
    if right >= 0:
        cut = cut | (last > tiles.position + right)
    if rows.slopes is None and not cut.any():
        return
    local = (begin[:, None] + np.arange(width))[:, None, :]
    key = local * every + rank
    query = (tiles.position[:, None] + np.arange(tiles.rows))[:, :, None]
    by_head = scores.reshape(
        len(tiles), problem.num_heads_kv, problem.group_size, tiles.rows, width
    )
    if rows.slopes is not None:
        distance = np.abs(query - key).astype(np.float32)
        slopes = rows.slopes[tiles.request]
        by_head -= slopes[..., None, None] * distance[:, None, None]
    if cut.any():
        hidden = local >= tiles.kv_end[:, None, None]
        if left >= 0:
            hidden = hidden | (key < query - left)
        if right >= 0:
            hidden = hidden | (key > query + right)
        np.copyto(by_head, -np.inf, where=hidden[:, None, None])


def _accumulate(scores: Array, v: Array, top: Array, total: Array, acc: Array) -> None:
    """Fold one block into the running state, in place; ``scores`` become the weights."""
    new_top = np.maximum(top, scores.max(-1))
    shift = np.where(np.isneginf(new_top), np.float32(0), new_top)
    scores -= shift[..., None]
    np.exp(scores, out=scores)
    if (new_top != top).any():
        rescale = np.exp(top - shift)
        total *= rescale
        acc *= rescale[..., None]
        top[...] = new_top
    total += scores.sum(-1)
    acc += np.matmul(scores, v)


def _finish(
    problem: AttentionProblem,
    tiles: Tiles,
    rows: _RowArguments,
    state: tuple[Array, Array, Array],
    out: Array,
    lse: Array | None,
) -> None:
    """Merge the sink, normalise, apply v's descale, and store."""
    shape = (len(tiles), problem.num_heads_kv, problem.group_size, tiles.rows)
    top, total, acc = state[0].reshape(shape), state[1].reshape(shape), state[2].reshape(*shape, -1)
    if rows.sink is not None:
        sink = rows.sink[:, :, None]
        new_top = np.maximum(top, sink)
        shift = np.where(np.isneginf(new_top), np.float32(0), new_top)
        rescale = np.exp(top - shift)
        total = total * rescale + np.exp(sink - shift)
        acc, top = acc * rescale[..., None], new_top
    empty = total == 0
    acc /= np.where(empty, np.float32(1), total)[..., None]
    if rows.v_descale is not None:
        acc *= rows.v_descale[tiles.request, :, None, None, None]
    index = _rows(tiles)
    by_row = acc.transpose(0, 3, 1, 2, 4).reshape(len(index), problem.num_heads_q, -1)
    out[index] = by_row.astype(out.dtype)
    if lse is not None:
        value = np.where(empty, np.float32(-np.inf), top + np.log(total))
        lse[:, index] = value.transpose(1, 2, 0, 3).reshape(problem.num_heads_q, -1)
