"""Launches of the portable decode kernel, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass

from .attention_tiles import STATIC_BYTES, Tile, score_mod
from .compile import native_arch
from .device import RESERVED_SMEM, DeviceInfo
from .divisors import inverse, log2
from .even import NOT_EVEN
from .plan import Plan
from .problem import AttentionProblem
from .spans import ALIGN_BYTES, ANY_ROWS, MOST_TILES, SpanMemory, schedule_plan, span_memory
from .workspace import COUNTERS

__all__ = ["DECODE_ROWS", "SpanPlan", "make_span_plan", "serves"]

DECODE_ROWS = 16
"""Rows (queries times heads of a group) that a request may have."""

_FEWEST_KEYS = 128  # of a span
_SEGMENT_TILES = 4  # that a segment's beginning and end take as long as


@dataclass(frozen=True, slots=True, eq=False)
class SpanPlan:
    """One launch; before it one of schedule.cu, if there is a table to be made or counters cleared.

    Attributes
    ----------
    forward : Plan
    schedule : Plan
    memory : SpanMemory
    row_block : int
        Rows of a segment.
    numbers : tuple of int
        The fields of ``DecodeParams`` after its pointers, up to the block table's.
    """

    forward: Plan
    schedule: Plan
    memory: SpanMemory
    row_block: int
    numbers: tuple[int, ...]


def serves(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether the tiles of all keys within the bounds can be counted."""
    tiles = -(-problem.max_seqlen_k // tile.keys) + _SEGMENT_TILES
    return problem.batch * problem.num_heads_kv * tiles < MOST_TILES


def make_span_plan(
    problem: AttentionProblem,
    info: DeviceInfo,
    tile: Tile,
    workspace_limit: int,
    most_rows: int = ANY_ROWS,
) -> SpanPlan:
    """The launch of a problem that the tile serves; fewer spans fit a small workspace.

    Requests of more than ``most_rows`` rows are left to another launch.
    """
    rows = min(problem.max_seqlen_q, problem.total_q) * problem.group_size
    row_block = min(DECODE_ROWS, max(1, rows))
    segments, tiles = problem.batch * problem.num_heads_kv, -(-problem.max_seqlen_k // tile.keys)
    pieces = problem.num_splits if tiles > 1 else 1
    most = min(info.num_sms * _blocks(tile, info), COUNTERS, max(1, segments * tiles))

    def memory_of(spans: int) -> SpanMemory:
        kept = 2 * spans * row_block if pieces != 1 else 0
        return span_memory(kept, problem.head_dim_v, problem.batch, spans)

    slot = 2 * row_block * (problem.head_dim_v + 2) * 4
    spans = min(most, (workspace_limit - memory_of(0).nbytes - 32) // (slot + 4))
    if spans < min(segments, most) or spans < 2:
        pieces, spans = 1, most
    memory = memory_of(spans)
    tile_bytes = tile.keys * problem.kv_type.itemsize * (problem.head_dim + problem.head_dim_v)
    numbers = (
        spans,
        log2(tile.keys),
        row_block,
        problem.num_heads_kv,
        0,
        log2(max(1, _FEWEST_KEYS // tile.keys)),
        min(ALIGN_BYTES // tile_bytes, MOST_TILES - 1),
        pieces,
        0,
        spans,
        most_rows,
        _SEGMENT_TILES if segments > most else 0,
        *(0,) * 7,  # of copies by TMA
        inverse(problem.group_size),
        *NOT_EVEN,
    )
    variant = tile.variant(native_arch(info.capability), score_mod(problem))
    grid = (spans if problem.batch and problem.total_q else 0, 1, 1)
    forward = Plan(variant, grid, (tile.threads, 1, 1), tile.smem_bytes, memory.nbytes)
    schedule = schedule_plan(problem.batch, info.capability)
    return SpanPlan(forward, schedule, memory, row_block, numbers)


def _blocks(tile: Tile, info: DeviceInfo) -> int:
    """That run on a multiprocessor at the same time."""
    room = info.smem_optin + RESERVED_SMEM
    return max(1, min(tile.blocks, room // (tile.smem_bytes + STATIC_BYTES + RESERVED_SMEM)))
