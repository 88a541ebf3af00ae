"""Launching the portable attention kernels; arguments are validated already."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import place
from .attention_args import Tiling, arrays_of, pack_attention, results
from .attention_plan import AttentionPlan, make_attention_plans
from .call import Call
from .costs import ALONE
from .decode_tile import DECODE_PARAMS
from .device import Device, DeviceInfo, device_for
from .key_maps import bits_of_out
from .launch import launch, stream_handle
from .layout import Layout
from .params import KernelArgs
from .span_plan import SpanPlan
from .workspace import with_memory

__all__ = ["attend", "usable_bytes"]

_UINT8 = np.dtype(np.uint8)


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
    out, lse = results(call, device, given)
    queue = device.current_stream() if given is None else given

    def launches(block: Any, counters: Any) -> None:
        for part in parts:
            part.queue(call, device, (out, lse), block, counters, queue)

    with_memory(device, queue, workspace, nbytes, launches)
    return out, lse


class _Tiles:
    """Launches of blocks that have one segment each."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, self._combine = plan, plan.combine
        self._tiling = Tiling(
            plan.chunk, plan.blocks_a_request, plan.row_block, plan.partial_rows, plan.skipped_rows
        )

    def queue(
        self,
        call: Call,
        device: Device,
        found: tuple[Any, Any],
        block: Any,
        counters: Any,
        stream: int,
    ) -> None:
        del counters
        scratch = None if self._combine is None else block
        packed = pack_attention(call, device, *found, scratch, self._tiling)
        args = KernelArgs((packed,), arrays_of(call, *found, scratch))
        launch(device, self.plan.forward, args, stream)
        if self._combine is not None:
            launch(device, self._combine, args, stream)


class _Spans:
    """The launch of blocks that have a span of the batch each."""

    def __init__(self, layout: Layout, plan: SpanPlan) -> None:
        self.plan, self._memory = plan, plan.memory
        self._tiling = Tiling(0, 0, plan.row_block, plan.memory.rows)
        self._out_bits = bits_of_out(layout)
        self._tails = [DECODE_PARAMS.pack_tail(*plan.numbers, 0, wide, *ALONE) for wide in (0, 1)]

    def queue(
        self,
        call: Call,
        device: Device,
        found: tuple[Any, Any],
        block: Any,
        counters: Any,
        stream: int,
    ) -> None:
        memory = self._memory
        scratch = block if memory.rows else None
        packed = pack_attention(call, device, *found, scratch, self._tiling)
        tail = self._tails[(device.pointer(found[0]) | self._out_bits) % 8 == 0]
        arrays = arrays_of(call, *found, block, counters)
        *partials, arrivals, made, cleared = memory.pointers(device, block, counters)
        if cleared or made:
            values = DECODE_PARAMS.pack_head(tail, *partials, cleared, made, 0)
            launch(device, self.plan.schedule, KernelArgs((packed, values), arrays), stream)
        values = DECODE_PARAMS.pack_head(tail, *partials, arrivals, made, 0)
        launch(device, self.plan.forward, KernelArgs((packed, values), arrays), stream)


_Part = _Tiles | _Spans


def _parts(layout: Layout, info: DeviceInfo, limit: int | None) -> tuple[_Part, ...]:
    """In the order of their launches."""
    key = info if limit is None else (info, limit)
    return layout.kept.get(key) or layout.keep(key, lambda: _make_parts(layout, info, limit))


def _make_parts(layout: Layout, info: DeviceInfo, limit: int | None) -> tuple[_Part, ...]:
    limits = () if limit is None else (limit,)
    plans = make_attention_plans(layout.problem, info, *limits)
    return tuple(
        _Spans(layout, plan) if isinstance(plan, SpanPlan) else _Tiles(plan) for plan in plans
    )


def usable_bytes(call: Call, device: Device, workspace: Any) -> int | None:
    """Bytes of the caller's workspace."""
    if workspace is None:
        return None
    place(("q", "workspace"), (call.arrays.q, workspace))
    if workspace.dtype != _UINT8 or workspace.ndim != 1 or workspace.strides != (1,):
        raise ValueError(
            f"workspace is {workspace.dtype} {workspace.shape}; it must be contiguous uint8 "
            "[nbytes]"
        )
    if device.pointer(workspace) % 16:
        raise ValueError("workspace must start at a multiple of 16 bytes")
    return int(workspace.nbytes)
