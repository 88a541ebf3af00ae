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
    plan, tiling = _plan(call.layout, device.info, usable_bytes(call, device, workspace))
    out, lse = results(call, device, given)
    queue = device.current_stream() if given is None else given
    if plan.combine is None:
        _queue(call, plan, tiling, device, (out, lse), None, queue)
    elif workspace is not None:
        _queue(call, plan, tiling, device, (out, lse), workspace, queue)
    else:
        with scratch_of(device, queue) as scratch:
            block = scratch.reserve(plan.forward.workspace_bytes)
            _queue(call, plan, tiling, device, (out, lse), block, queue)
    return out, lse


def _plan(layout: Layout, info: DeviceInfo, limit: int | None) -> tuple[AttentionPlan, Tiling]:
    key = info if limit is None else (info, limit)
    return layout.kept.get(key) or layout.keep(key, lambda: _make_plan(layout, info, limit))


def _make_plan(layout: Layout, info: DeviceInfo, limit: int | None) -> tuple[AttentionPlan, Tiling]:
    limits = () if limit is None else (limit,)
    plan = make_attention_plan(layout.problem, info, *limits)
    tiling = Tiling(plan.chunk, plan.blocks_a_request, plan.row_block, plan.partial_rows)
    return plan, tiling


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
    plan: AttentionPlan,
    tiling: Tiling,
    device: Device,
    found: tuple[Any, Any],
    scratch: Any,
    stream: int,
) -> None:
    packed = pack_attention(call, device, *found, scratch, tiling)
    args = KernelArgs((packed,), arrays_of(call, *found, scratch))
    launch(device, plan.forward, args, stream)
    if plan.combine is not None:
        launch(device, plan.combine, args, stream)
