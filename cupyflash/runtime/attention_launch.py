"""Launching the portable attention kernels; arguments are validated already."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import place
from .attention_args import Tiling, arrays_of, pack_attention, results
from .attention_plan import AttentionPlan, make_attention_plan
from .call import Call
from .device import Device, DeviceInfo, device_for
from .launch import launch, stream_handle
from .layout import Layout
from .params import KernelArgs
from .workspace import scratch_of

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
    nbytes = parts[-1][0].forward.workspace_bytes
    out, lse = results(call, device, given)
    queue = device.current_stream() if given is None else given
    if not nbytes or workspace is not None:
        _queue(call, parts, device, (out, lse), workspace, queue)
    else:
        with scratch_of(device, queue) as scratch:
            _queue(call, parts, device, (out, lse), scratch.reserve(nbytes), queue)
    return out, lse


_Parts = tuple[tuple[AttentionPlan, Tiling], ...]


def _parts(layout: Layout, info: DeviceInfo, limit: int | None) -> _Parts:
    key = info if limit is None else (info, limit)
    return layout.kept.get(key) or layout.keep(key, lambda: _make_parts(layout, info, limit))


def _make_parts(layout: Layout, info: DeviceInfo, limit: int | None) -> _Parts:
    """In the order of their launches."""
    limits = () if limit is None else (limit,)
    plan = make_attention_plan(layout.problem, info, *limits)
    return tuple((part, _tiling(part)) for part in (plan.short, plan) if part)


def _tiling(plan: AttentionPlan) -> Tiling:
    return Tiling(
        plan.chunk, plan.blocks_a_request, plan.row_block, plan.partial_rows, plan.most_rows
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


def _queue(
    call: Call,
    parts: _Parts,
    device: Device,
    found: tuple[Any, Any],
    workspace: Any,
    stream: int,
) -> None:
    for plan, tiling in parts:
        scratch = None if plan.combine is None else workspace
        packed = pack_attention(call, device, *found, scratch, tiling)
        args = KernelArgs((packed,), arrays_of(call, *found, scratch))
        launch(device, plan.forward, args, stream)
        if plan.combine is not None:
            launch(device, plan.combine, args, stream)
