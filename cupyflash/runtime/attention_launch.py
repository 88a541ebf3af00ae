"""Launching the portable attention kernels; arguments are validated already."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import AttentionArrays
from .attention_plan import ATTENTION_PARAMS, AttentionPlan, make_attention_plan
from .call import Call
from .device import Device, device_for
from .dtypes import FP32, scalar_type
from .launch import launch, stream_handle
from .params import KernelArgs
from .problem import AttentionProblem
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
    problem, arrays = call.problem, call.arrays
    out, lse = arrays.out, arrays.lse
    if out is None:
        shape = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        out = device.empty(shape, problem.out_type.numpy, stream)
    if lse is None and problem.wants_lse:
        lse = device.empty((problem.num_heads_q, problem.total_q), np.dtype(np.float32), stream)
    scratch = workspace if plan.combine is not None else None
    packed = _pack(problem, plan, arrays, call.descales, out, lse, device, scratch)
    used = (*arrays, *call.descales, out, lse, scratch)
    args = KernelArgs((packed,), tuple(a for a in used if hasattr(a, "dtype")))
    launch(device, plan.forward, args, stream)
    if plan.combine is not None:
        launch(device, plan.combine, args, stream)
    return out, lse


def _pack(
    problem: AttentionProblem,
    plan: AttentionPlan,
    arrays: AttentionArrays,
    descales: tuple[Any, Any, Any],
    out: Any,
    lse: Any,
    device: Device,
    workspace: Any,
) -> np.ndarray[Any, Any]:
    def pointer(array: Any) -> int:
        return 0 if array is None else device.pointer(array)

    q, k, v = arrays.q, arrays.k, arrays.v
    alibi, sink, table = arrays.alibi_slopes, arrays.s_aux, arrays.block_table
    scales = [d if hasattr(d, "dtype") else None for d in descales]
    numbers = [1.0 if d is None or hasattr(d, "dtype") else d for d in descales]
    partial_out = pointer(workspace)
    partial_lse = partial_out + plan.partial_rows * problem.head_dim_v * 4
    sink_type = None if sink is None else scalar_type(sink.dtype)
    return ATTENTION_PARAMS.pack(
        pointer(q),
        pointer(k),
        pointer(v),
        pointer(out),
        pointer(lse),
        pointer(arrays.cu_seqlens_q),
        pointer(arrays.cu_seqlens_k),
        pointer(arrays.seqused_k),
        pointer(table),
        pointer(alibi),
        pointer(sink),
        *(pointer(scale) for scale in scales),
        partial_out,
        partial_lse if partial_out else 0,
        *q.strides[:2],
        *_cache_strides(k),
        *_cache_strides(v),
        *out.strides[:2],
        *((0, 0) if lse is None else lse.strides),
        0 if table is None else table.strides[0],
        *((0, 0) if alibi is None else (0, *alibi.strides)[-2:]),
        0 if sink is None else sink.strides[0],
        *(stride for scale in scales for stride in _descale_strides(scale)),
        problem.batch,
        problem.total_q,
        problem.num_heads_q,
        problem.num_heads_kv,
        problem.group_size,
        problem.head_dim,
        problem.head_dim_v,
        problem.page_size or 1,
        *_window(problem),
        plan.chunk,
        plan.blocks_a_request,
        plan.row_block,
        problem.q_type.code,
        problem.out_type.code,
        (sink_type or FP32).code,
        *(_aligned(device, array, 8 * array.itemsize) for array in (q, k, v)),
        _aligned(device, out, 4),
        problem.softmax_scale * numbers[0] * numbers[1],
        numbers[2],
        problem.softcap,
    )


def _cache_strides(array: Any) -> tuple[int, ...]:
    """Of (block, token, head)."""
    strides = tuple(array.strides)
    return strides[:3] if len(strides) == 4 else (0, *strides[:2])


def _descale_strides(scale: Any) -> tuple[int, int]:
    """Of (request, head); one value serves all."""
    if scale is None or scale.ndim < 2:
        return 0, 0
    return int(scale.strides[0]), int(scale.strides[1])


def _window(problem: AttentionProblem) -> tuple[int, int]:
    """Left and right reach; -1 also where it goes past every key, so that sums cannot overflow."""
    far = problem.max_seqlen_q + problem.max_seqlen_k
    left, right = problem.window_left, problem.window_right
    return (-1 if left >= far else left), (-1 if right >= far else right)


def _aligned(device: Device, array: Any, nbytes: int) -> bool:
    """Whether every row starts at a multiple of ``nbytes``."""
    bits = device.pointer(array)
    for stride in array.strides[:-1]:
        bits |= stride
    return bits % nbytes == 0
