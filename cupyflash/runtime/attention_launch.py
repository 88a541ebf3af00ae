"""Launching the portable attention kernels; arguments are validated already."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention_args import Tiling, arrays_of, pack_attention, results
from .attention_plan import AttentionPlan, make_attention_plan
from .call import Call
from .device import Device, device_for
from .launch import launch, stream_handle
from .params import KernelArgs
from .workspace import scratch_of

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
    device, queue, problem = device_for(call.arrays.q), stream_handle(stream), call.problem
    if workspace is not None:
        _check_workspace(device, workspace)
        plan = make_attention_plan(problem, device.info, int(workspace.nbytes))
        return _launch(call, plan, device, workspace, queue)
    plan = make_attention_plan(problem, device.info)
    if not plan.forward.workspace_bytes:
        return _launch(call, plan, device, None, queue)
    with scratch_of(device, queue) as scratch:
        block = scratch.reserve(plan.forward.workspace_bytes)
        return _launch(call, plan, device, block, queue)


def _check_workspace(device: Device, workspace: Any) -> None:
    if workspace.dtype != np.uint8 or workspace.ndim != 1 or workspace.strides != (1,):
        raise ValueError(
            f"workspace is {workspace.dtype} {workspace.shape}; it must be contiguous uint8 "
            "[nbytes]"
        )
    if device.pointer(workspace) % 16:
        raise ValueError("workspace must start at a multiple of 16 bytes")


def _launch(
    call: Call, plan: AttentionPlan, device: Device, workspace: Any, stream: int | None
) -> tuple[Any, Any]:
    out, lse = results(call, device, stream)
    scratch = workspace if plan.combine is not None else None
    tiling = Tiling(plan.chunk, plan.blocks_a_request, plan.row_block, plan.partial_rows)
    packed = pack_attention(call, device, out, lse, scratch, tiling)
    args = KernelArgs((packed,), arrays_of(call, out, lse, scratch))
    launch(device, plan.forward, args, stream)
    if plan.combine is not None:
        launch(device, plan.combine, args, stream)
    return out, lse
