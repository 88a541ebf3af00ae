"""Launches in which every block takes a span of the batch: their workspace, what goes before."""

from __future__ import annotations

from typing import Any, NamedTuple

from .decode_tile import schedule_variant
from .device import Device
from .plan import Plan
from .workspace import COUNTERS

__all__ = [
    "ALIGN_BYTES",
    "ANY_ROWS",
    "LARGEST_SCAN",
    "MOST_TILES",
    "PREFIX_EXTRA",
    "SpanMemory",
    "SpanPointers",
    "schedule_plan",
    "span_memory",
]

LARGEST_SCAN = 512
"""Requests that every block adds up for itself: 128 threads, 4 each."""

PREFIX_EXTRA = 6
"""int32 words of the table of schedule.cu besides one a request."""

ALIGN_BYTES = 1_600_000_000
"""Of keys and values; past it spans of equal length win."""

MOST_TILES = 1 << 31
ANY_ROWS = MOST_TILES - 1

_SCHEDULE_THREADS = 1024


class SpanMemory(NamedTuple):
    """Where things lie in the workspace of a launch over spans.

    Attributes
    ----------
    rows : int
        Of all partial outputs together, at its start; 0 where segments are never split.
    state_at, table_at, counters_at : int
        Their states, the table of a large batch, counters of arrivals if there are no others.
    nbytes : int
    many : bool
        There are more counters than a stream has.
    has_table : bool
        schedule.cu adds the lengths up, and not every block.
    """

    rows: int
    state_at: int
    table_at: int
    counters_at: int
    nbytes: int
    many: bool
    has_table: bool

    def pointers(self, device: Device, block: Any, counters: Any) -> SpanPointers:
        """Addresses in ``block``; ``counters`` are 0 between launches, or None."""
        start = 0 if block is None else device.pointer(block)
        partials = (start, start + self.state_at) if self.rows else (0, 0)
        own = self.rows > 0 and (self.many or counters is None)
        cleared = start + self.counters_at if own else 0
        made = start + self.table_at if self.has_table else 0
        arrivals = cleared or (device.pointer(counters) if self.rows else 0)
        return SpanPointers(*partials, arrivals, made, cleared)


class SpanPointers(NamedTuple):
    """The pointers of ``DecodeParams``; ``cleared``: arrivals that schedule.cu sets to 0."""

    partial_out: int
    partial_state: int
    arrivals: int
    prefix: int
    cleared: int


def schedule_plan(batch: int, capability: tuple[int, int] = (9, 0)) -> Plan:
    """The launch that makes the table of a batch."""
    return Plan(schedule_variant(capability), (1 if batch else 0, 1, 1), (_SCHEDULE_THREADS, 1, 1))


def span_memory(rows: int, head_dim_v: int, batch: int, counters: int) -> SpanMemory:
    """The workspace for so many partial rows and counters of arrivals.

    schedule.cu makes a table of a large ``batch``; 0 where blocks add up the lengths of any.
    """
    table = batch > LARGEST_SCAN
    state_at = rows * head_dim_v * 4
    table_at = _round16(state_at + rows * 8)
    counters_at = table_at + (_round16((batch + PREFIX_EXTRA) * 4) if table else 0)
    nbytes = counters_at + (_round16(counters * 4) if rows else 0)
    return SpanMemory(rows, state_at, table_at, counters_at, nbytes, counters >= COUNTERS, table)


def _round16(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
