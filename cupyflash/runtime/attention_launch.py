"""Launching the portable attention kernels; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .attention_args import Tiling
from .attention_plan import AttentionPlan, make_attention_plans
from .call import Call
from .costs import ALONE
from .decode_tile import DECODE_PARAMS
from .device import DeviceInfo, device_for
from .key_maps import bits_of_out
from .launch import stream_handle
from .layout import Layout
from .span_plan import SpanPlan
from .work import Work, queue_work, usable_bytes

__all__ = ["attend"]


def attend(call: Call, scheduler_metadata: Any, workspace: Any, stream: Any) -> tuple[Any, Any]:
    """Queue attention of every request.

    Parameters
    ----------
    call : Call
    scheduler_metadata
        Not needed: every block finds its work from the lengths.
    workspace : array [nbytes], uint8, optional
        Scratch; keys are split into fewer pieces where it is small. The device's own if None.
    stream : int or stream, optional

    Returns
    -------
    out : array [total_q, num_heads_q, head_dim_v]
    lse : array [num_heads_q, total_q], float32, or None

    Raises
    ------
    ValueError
        The workspace is not bytes, or not aligned.
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    del scheduler_metadata
    device, given = device_for(call.arrays.q), stream_handle(stream)
    parts = _parts(call.layout, device.info, usable_bytes(call, device, workspace))
    nbytes = max([part.plan.forward.workspace_bytes for part in parts])

    def queue(work: Work) -> None:
        for part in parts:
            part.queue(work)

    handle = device.current_stream() if given is None else given
    return queue_work(call, device, handle, workspace, nbytes, queue)


class _Tiles:
    """Launches of blocks that have one segment each."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, self._combine = plan, plan.combine
        self._tiling = Tiling(
            plan.chunk, plan.blocks_a_request, plan.row_block, plan.partial_rows, plan.skipped_rows
        )

    def queue(self, work: Work) -> None:
        scratch = None if self._combine is None else work.block
        values, arrays = (work.pack(self._tiling, scratch),), work.touched(scratch)
        work.launch(self.plan.forward, values, arrays)
        if self._combine is not None:
            work.launch(self._combine, values, arrays)


class _Spans:
    """The launch of blocks that have a span of the batch each."""

    def __init__(self, layout: Layout, plan: SpanPlan) -> None:
        self.plan, self._memory = plan, plan.memory
        self._tiling = Tiling(0, 0, plan.row_block, plan.memory.rows)
        self._out_bits = bits_of_out(layout)
        self._tails = [DECODE_PARAMS.pack_tail(*plan.numbers, 0, wide, *ALONE) for wide in (0, 1)]

    def queue(self, work: Work) -> None:
        block, counters = work.block, work.counters
        packed = work.pack(self._tiling, block if self._memory.rows else None)
        tail = self._tails[(work.device.pointer(work.out) | self._out_bits) % 8 == 0]
        arrays = work.touched(block, counters)
        *partials, arrivals, made, cleared = self._memory.pointers(work.device, block, counters)
        if cleared or made:
            values = DECODE_PARAMS.pack_head(tail, *partials, cleared, made, 0)
            work.launch(self.plan.schedule, (packed, values), arrays)
        values = DECODE_PARAMS.pack_head(tail, *partials, arrivals, made, 0)
        work.launch(self.plan.forward, (packed, values), arrays)


_Part = _Tiles | _Spans


def _parts(layout: Layout, info: DeviceInfo, limit: int | None) -> tuple[_Part, ...]:
    """In the order of their launches."""
    key = info if limit is None else (info, limit)
    return layout.kept.get(key) or layout.keep(key, lambda: _make_parts(layout, info, limit))


def _make_parts(layout: Layout, info: DeviceInfo, limit: int | None) -> tuple[_Part, ...]:
    plans = make_attention_plans(layout.problem, info, limit)
    return tuple(
        _Spans(layout, plan) if isinstance(plan, SpanPlan) else _Tiles(plan) for plan in plans
    )
