"""Launches of the Hopper decode kernel, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from .costs import ALONE, beside_prefill
from .decode_plain import is_plain
from .decode_tile import BUCKETS, DecodeTile, row_tiles, shared_ring_tiles, warp_counts
from .device import RESERVED_SMEM, DeviceInfo
from .divisors import inverse, log2, page_shift
from .dtypes import FP16
from .even import NOT_EVEN, even_cut
from .plan import LARGEST_WORKSPACE, Plan
from .problem import AttentionProblem
from .spans import (
    ALIGN_BYTES,
    ANY_ROWS,
    LARGEST_SCAN,
    MOST_TILES,
    SpanMemory,
    schedule_plan,
    span_memory,
)
from .workspace import COUNTERS, MAILBOX

__all__ = [
    "DecodePlan",
    "decode_refusal",
    "head_bucket",
    "make_decode_plan",
    "most_decode_rows",
    "workspace_behind",
]

_IN_FLIGHT = 192 << 10  # bytes a multiprocessor asks for ahead
# Up to which one block of 8 warps on a multiprocessor, with fewer pieces to merge, is better than
# two of 4; and the same for pieces of many rows.
_FEW_SEGMENTS, _FEW_OF_MANY_ROWS, _MANY_ROWS = 4, 64, 8
_CONTIGUOUS = 256  # bytes of neighbouring heads that are worth reading together
_CHUNKS = 16  # of a request's keys, with batch_invariant=True
_LINE = 256  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """One launch, or two with the schedule.

    Attributes
    ----------
    attend : Plan
    schedule : Plan
        Before it, if there is a table to be made or counters to be set to 0.
    memory : SpanMemory
    mails : bool
        Whether the partial results of a launch fit into a stream's `MAILBOX`.
    numbers : tuple of int
        The fields of ``DecodeParams`` after its pointers, up to the block table's.
    times : tuple of float
        The last fields of ``DecodeParams``.
    box_rows, k_panels, v_panels : int
        Keys of a TMA box; panels of 128 bytes that are loaded of a row.
    whole_boxes : bool
        A box has all panels of its keys.
    box_heads : int
        Heads of a box.
    """

    attend: Plan
    schedule: Plan
    memory: SpanMemory
    mails: bool
    numbers: tuple[int, ...]
    times: tuple[float, float, float]
    box_rows: int
    k_panels: int
    v_panels: int
    whole_boxes: bool
    box_heads: int

    def with_workspace(self, nbytes: int) -> DecodePlan:
        """The same with more workspace, behind its own."""
        return replace(self, attend=replace(self.attend, workspace_bytes=nbytes))


def decode_refusal(problem: AttentionProblem, info: DeviceInfo) -> str:
    """Why the decode kernel does not serve a problem; empty where it does."""
    if info.capability != (9, 0):
        return "it is for compute capability 9.0"
    if not problem.batch or not problem.total_q:
        return "there are no queries"
    most = most_decode_rows(problem)
    rows = _tokens(problem) * problem.group_size
    if rows > most:
        return f"a request may have {rows} rows a KV head, it takes {most}"
    tile = _tile(problem)
    tiles = problem.batch * problem.num_heads_kv * -(-problem.max_seqlen_k // tile.keys)
    if tiles >= MOST_TILES:
        return f"{tiles} key tiles within the bounds, it counts to {MOST_TILES - 1}"
    return ""


def most_decode_rows(problem: AttentionProblem) -> int:
    """Queries times heads of a group that a request may have."""
    return row_tiles(head_bucket(problem))[-1]


def head_bucket(problem: AttentionProblem) -> int:
    """The compiled head size that serves a problem."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(bucket for bucket in BUCKETS if widest <= bucket)


def _has_table(problem: AttentionProblem) -> bool:
    """Of tiles before each request, made ahead by what the bounds say alone."""
    return problem.batch > LARGEST_SCAN


def _tokens(problem: AttentionProblem) -> int:
    """Queries of a request, at most. A table is made without knowing ``total_q``."""
    if problem.batch > LARGEST_SCAN:
        return problem.max_seqlen_q
    return min(problem.max_seqlen_q, problem.total_q)


def _tile(problem: AttentionProblem, alone: bool = False) -> DecodeTile:
    """``alone``: one block has a multiprocessor."""
    cache, head_dim = problem.kv_type, head_bucket(problem)
    tiles, compute = row_tiles(head_dim), FP16 if cache.is_fp8 else cache
    if problem.batch_invariant:  # one kernel for all bounds
        return DecodeTile(compute, cache, head_dim, tiles[-1])
    rows = _tokens(problem) * problem.group_size
    fitting = next((r for r in tiles if rows <= r), tiles[-1])
    return DecodeTile(compute, cache, head_dim, fitting, warp_counts(head_dim)[-1 if alone else 0])


def _side_by_side(problem: AttentionProblem, info: DeviceInfo, mixed: bool) -> int:
    """KV heads that a block takes together, so that short rows are read beside each other.

    Not where it leaves too few segments: a split one costs more than the rows gain. Of eight heads
    a warp of a block of 8 takes one each, where nearly every multiprocessor gets a piece all the
    same and a segment is two pieces at most.
    """
    if problem.batch_invariant:
        return 1
    eight, rest = divmod(problem.num_heads_kv, 8)
    alone = _tokens(problem) * problem.group_size <= 8 and not (mixed or problem.num_splits)
    many = 2 * problem.batch * eight >= info.num_sms - info.num_sms // 16
    if alone and not rest and many and not _has_table(problem):
        paged = problem.page_size is not None and problem.page_size % 16 == 0
        if paged and head_bucket(problem) == 128 and not problem.kv_type.is_fp8:
            return 8 if is_plain(problem, _tile(problem)) else 1
    row, heads = problem.head_dim * problem.kv_type.itemsize, 1
    while heads < 4 and heads * row < _CONTIGUOUS:
        fewer, rest = divmod(problem.num_heads_kv, 2 * heads)
        if rest or problem.batch * fewer < info.num_sms:
            break
        heads *= 2
    return heads


@lru_cache(maxsize=4096)
def make_decode_plan(
    problem: AttentionProblem,
    info: DeviceInfo,
    workspace_limit: int | None = None,
    most_rows: int = ANY_ROWS,
) -> DecodePlan:
    """The launches of a problem that is not refused; fewer spans fit a small workspace.

    Requests of more than ``most_rows`` rows (queries times heads of a group) are left to a prefill
    launch, which runs beside this one.
    """
    mixed = most_rows < ANY_ROWS
    unit = _side_by_side(problem, info, mixed)
    invariant = problem.batch_invariant
    segments = problem.batch * problem.num_heads_kv // unit
    rows = _tokens(problem) * problem.group_size
    few = segments <= (_FEW_SEGMENTS if rows * unit < _MANY_ROWS else _FEW_OF_MANY_ROWS)
    alone = mixed or head_bucket(problem) > 128 or unit == 8 or (few and not invariant)
    tile, blocks = _tile(problem, alone), 1 if alone else 2  # a multiprocessor
    row_block = min(tile.rows, max(1, rows))
    table = _has_table(problem)
    prefix_bytes = span_memory(0, 0, problem.batch, 0).nbytes
    slot_bytes = 2 * unit * row_block * (problem.head_dim_v + 2) * 4
    limit = LARGEST_WORKSPACE if workspace_limit is None else workspace_limit
    pieces, most = problem.num_splits, min(info.num_sms * blocks, COUNTERS)
    spans = min(most, max(0, limit - prefix_bytes) // (slot_bytes + 4))
    if invariant or spans < min(segments, most) or spans < 2:
        pieces, spans = 1, most
    room = (info.smem_optin + RESERVED_SMEM) // blocks - RESERVED_SMEM
    per_stage = tile.warps * (tile.stage_bytes + 8)
    columns, prefix_words = min(tile.head_dim, 128), 0 if table else problem.batch + 1
    rest = _rest_bytes(tile, row_block, columns, prefix_words)
    # Two stages and all columns merged at a time are quicker than three stages.
    while columns > 16 and rest + 2 * per_stage > room:
        columns //= 2
        rest = _rest_bytes(tile, row_block, columns, prefix_words)
    wanted = _IN_FLIGHT // (blocks * tile.warps * tile.stage_bytes)
    stages = max(1, min((room - rest) // per_stage, wanted))
    box_rows = gcd(problem.page_size, 16) if problem.page_size else 16
    k_panels, v_panels, whole = _panels(problem, tile, box_rows)
    tile_bytes = tile.keys * unit * problem.kv_type.itemsize
    tile_bytes *= problem.head_dim + problem.head_dim_v
    align = min(ALIGN_BYTES // tile_bytes, MOST_TILES - 1)
    counters = problem.batch * problem.num_heads_kv if invariant else spans
    slots = counters * _CHUNKS if invariant else 2 * spans if pieces != 1 else 0
    kept = slots * unit * row_block
    mails = 0 < kept <= 2 * MAILBOX // _mail_words(problem.head_dim_v) and not invariant
    beside = not mixed or tile.rows == row_tiles(tile.head_dim)[-1]
    if whole and columns == min(tile.head_dim, 128) and beside and not (table or pieces):
        tile = replace(tile, plain=is_plain(problem, tile))
    if unit > 1 and replace(tile, shared_rings=True) in shared_ring_tiles() and not mixed:
        tile = replace(tile, shared_rings=True)
    fewest, even = log2(tile.warps // unit), NOT_EVEN
    if tile.plain and not mixed:
        even = even_cut(problem.batch, problem.num_heads_kv // unit, spans, fewest, align)
    numbers = (
        spans,
        log2(tile.keys),
        row_block,
        problem.num_heads_kv // unit,
        log2(unit),
        fewest,
        align,
        pieces,
        _CHUNKS if invariant else 0,
        counters,
        most_rows,
        0,
        stages,
        log2(box_rows),
        k_panels,
        v_panels,
        int(whole),
        log2(columns),
        page_shift(problem.page_size),
        inverse(problem.group_size),
        *even,
    )
    memory = span_memory(kept, problem.head_dim_v, problem.batch, counters)
    smem_bytes = stages * per_stage + rest
    threads = 32 * tile.warps
    attend = Plan(tile.variant, (spans, 1, 1), (threads, 1, 1), smem_bytes, memory.nbytes, True)
    return DecodePlan(
        attend=attend,
        schedule=schedule_plan(problem.batch),
        memory=memory,
        mails=mails,
        numbers=numbers,
        times=beside_prefill(problem, tile_bytes, tile.plain) if mixed else ALONE,
        box_rows=box_rows,
        k_panels=k_panels,
        v_panels=v_panels,
        whole_boxes=whole,
        box_heads=unit if tile.shared_rings else 1,
    )


def workspace_behind(plan: Plan) -> int:
    """Where the workspace of a launch beside this one begins."""
    return -(-plan.workspace_bytes // _LINE) * _LINE


def _mail_words(head_dim_v: int) -> int:
    """Of a row of a span, as mainloop/mail_merge.cuh lays them out."""
    return head_dim_v + 2 * -(-head_dim_v // 32)


def _rest_bytes(tile: DecodeTile, row_block: int, columns: int, prefix_words: int) -> int:
    """Shared memory besides the ring, as mainloop/decode_merge_sm90.cuh lays it out."""
    floats = tile.warps * max(128 + 4, row_block * (columns + 4))
    return floats * 4 + tile.warps * (tile.rows * 8 + 3 * 4) + 2 * 4 + prefix_words * 4


def _panels(problem: AttentionProblem, tile: DecodeTile, box_rows: int) -> tuple[int, int, bool]:
    """Panels of k and of v, and whether one box can have all of them."""
    width = 128 // problem.kv_type.itemsize
    sizes = (problem.head_dim, problem.head_dim_v)
    whole = box_rows == 16 and all(size % width == 0 for size in sizes)
    if tile.head_dim <= 128:
        return tile.panels, tile.panels, whole
    k_panels, v_panels = (-(-size // width) for size in sizes)
    return k_panels, v_panels, whole
