"""The Hopper kernels, version 3: compute capability 9.0.

Decoding has a kernel of its own. A batch of decode steps and prefills is served by two launches,
each of which leaves the other's requests alone; what neither takes goes to the portable kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .bounds import AttentionBounds
from .portable import attend as attend_portable
from .portable import attention_plans as portable_plans
from .portable import write_schedule as write_header
from .runtime.arrays import array_module, on_stream
from .runtime.attention_plan import ATTENTION_PARAMS
from .runtime.call import Call
from .runtime.decode_bounds import decode_plans
from .runtime.decode_launch import HEADER_BYTES, attend_decode, layout_refusal
from .runtime.decode_plan import (
    DecodePlan,
    decode_refusal,
    make_decode_plan,
    most_decode_rows,
    workspace_behind,
)
from .runtime.decode_tile import DECODE_PARAMS
from .runtime.device import Device, DeviceInfo, device_for
from .runtime.key_maps import tma_refusal
from .runtime.launch import launch, stream_handle
from .runtime.layout import Layout
from .runtime.mla_launch import attend_latent
from .runtime.mla_plan import mla_note, mla_plans
from .runtime.params import KernelArgs
from .runtime.plan import Plan
from .runtime.prefill_launch import attend_prefill
from .runtime.prefill_plan import (
    PrefillPlan,
    make_prefill_plan,
    prefill_plans,
    prefill_refusal,
)
from .runtime.problem import AttentionProblem
from .runtime.rules.latent import is_latent
from .runtime.spans import LARGEST_SCAN, PREFIX_EXTRA
from .runtime.work import usable_bytes

__all__ = ["attend", "attention_plans", "kernel_note", "write_schedule"]

_HEADER = HEADER_BYTES // 4
_DECODE = "Hopper decode"
_WIDE = 16
_ALIGNED = (0, 0, 0, 0)


def attend(call: Call, scheduler_metadata: Any, workspace: Any, stream: Any) -> tuple[Any, Any]:
    """Queue attention of every request.

    Parameters
    ----------
    call : Call
    scheduler_metadata : SchedulerMetadata or its buffer, optional
        Saves large batches a launch.
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
    if call.problem.has_q_v:
        return attend_latent(call, workspace, stream, hopper=True)
    device = device_for(call.arrays.q)
    limit = None if workspace is None else usable_bytes(call, device, workspace)
    decode, prefill = _plans(call, device, limit)
    given = stream_handle(stream)
    queue = device.current_stream() if given is None else given
    if decode is None:
        if prefill is None:
            return attend_portable(call, scheduler_metadata, workspace, stream)
        return attend_prefill(call, prefill, device, workspace, queue)
    table = None if prefill else _table(call, decode, scheduler_metadata)
    found = attend_decode(call, decode, device, table, workspace, queue)
    return attend_prefill(call, prefill, device, workspace, queue, found) if prefill else found


def _table(call: Call, plan: DecodePlan, scheduler_metadata: Any) -> Any:
    """The table of a schedule that was made ahead, if it has one."""
    if not plan.memory.has_table or scheduler_metadata is None or call.problem.batch_invariant:
        return None
    table = getattr(scheduler_metadata, "buffer", scheduler_metadata)
    return table if table.size >= _HEADER + call.problem.batch + PREFIX_EXTRA else None


_Plans = tuple[DecodePlan | None, PrefillPlan | None]


def _plans(call: Call, device: Device, limit: int | None) -> _Plans:
    """What serves a call: one kernel, both, each its share of the requests, or neither."""
    arrays, at = call.arrays, device.pointer
    q, k, v, out = arrays.q, arrays.k, arrays.v, arrays.out
    starts = at(q), at(k), at(v), 0 if out is None else at(out)
    offsets = _ALIGNED
    if (starts[0] | starts[1] | starts[2] | starts[3]) % _WIDE:
        offsets = starts[0] % _WIDE, starts[1] % _WIDE, starts[2] % _WIDE, starts[3] % _WIDE
    layout, key = call.layout, (device.info, limit, offsets)
    found: _Plans | None = layout.kept.get(key)
    return found or layout.keep(key, lambda: _make_plans(layout, device.info, limit, offsets))


def _make_plans(
    layout: Layout, info: DeviceInfo, limit: int | None, offsets: tuple[int, ...]
) -> _Plans:
    problem = layout.problem

    def fits(nbytes: int) -> bool:
        return limit is None or nbytes <= limit

    decodes = not layout_refusal(layout, offsets[:3])
    no_prefill = prefill_refusal(problem, info) or tma_refusal(layout, offsets)
    if problem.batch_invariant and no_prefill:
        return None, None  # one kernel for requests of the same length, whatever the others'
    if decodes and not decode_refusal(problem, info):
        decode = make_decode_plan(problem, info, limit)
        if fits(decode.attend.workspace_bytes):
            return decode, None
        _refuse_other_bits(problem, decode.attend.workspace_bytes)
    if no_prefill:
        return None, None
    short = _short_requests(problem, info) if decodes else None
    if short is not None:
        rows = short.max_seqlen_q * problem.group_size
        decode = make_decode_plan(short, info, limit, most_rows=rows)
        prefill = make_prefill_plan(
            problem,
            info,
            limit,
            most_skipped=rows,
            workspace_at=workspace_behind(decode.attend),
        )
        if fits(prefill.attend.workspace_bytes):
            return decode.with_workspace(prefill.attend.workspace_bytes), prefill
        _refuse_other_bits(problem, prefill.attend.workspace_bytes)
    prefill = make_prefill_plan(problem, info, limit)
    return None, prefill if fits(prefill.attend.workspace_bytes) else None


def _refuse_other_bits(problem: AttentionProblem, nbytes: int) -> None:
    if problem.batch_invariant:
        raise ValueError(
            f"workspace is too small: batch_invariant=True needs {nbytes} bytes for these bounds, "
            "as keys are cut by their own lengths alone; pass workspace_size(bounds) bytes, or none"
        )


def _short_requests(problem: AttentionProblem, info: DeviceInfo) -> AttentionProblem | None:
    """The bounds of what the decode kernel takes of a batch that may have decode steps in it.

    A batch in which every request may be as long as the longest is taken as one without.
    """
    every = problem.total_q >= problem.batch * problem.max_seqlen_q
    if every and not problem.batch_invariant:
        return None
    tokens = max(1, most_decode_rows(problem) // problem.group_size)
    short = replace(problem, max_seqlen_q=min(tokens, problem.max_seqlen_q))
    return None if decode_refusal(short, info) else short


def kernel_note(problem: AttentionProblem, info: DeviceInfo) -> str:
    """Which kernels serve a problem whose rows start at multiples of 16 bytes, or why none does."""
    if problem.has_q_v:
        return mla_note(problem, info)
    no_decode, no_prefill = decode_refusal(problem, info), prefill_refusal(problem, info)
    if problem.batch_invariant and no_prefill:
        no_decode = "batch_invariant=True: longer requests could not have a kernel like it"
    if not no_decode:
        return _DECODE
    if no_prefill:
        return f"portable; not Hopper decode: {no_decode}; not Hopper prefill: {no_prefill}"
    name = "Hopper 8-bit prefill" if problem.q_type.is_fp8 else "Hopper prefill"
    if problem.kv_type.is_fp8 and not problem.q_type.is_fp8:
        name += " over an 8-bit cache"
    short = _short_requests(problem, info)
    if short is None:
        return f"{name}; not Hopper decode: {no_decode}"
    tokens = short.max_seqlen_q
    return f"{name}; requests of at most {tokens} queries by Hopper decode, at the same time"


def attention_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need, those of the problem first.

    Their workspace is enough for any of the calls.
    """
    if problem.has_q_v:
        return mla_plans(problem, info, hopper=True)
    prefill = prefill_plans(problem, info)
    beside = max((plan.workspace_bytes for plan in prefill), default=0)
    decode = decode_plans(problem, info, beside)
    portable = prefill + portable_plans(problem, info)
    if kernel_note(problem, info) == _DECODE:
        first = make_decode_plan(problem, info).attend
        decode.sort(key=lambda plan: plan.variant != first.variant)
        return decode + portable
    return portable + decode


def write_schedule(bounds: Any, seqused_k: Any, cu_seqlens_q: Any, out: Any, stream: Any) -> Any:
    """The header of a schedule, and behind it what large batches need: tiles before each request.

    Smaller ones need nothing: every block of a kernel adds the lengths up for itself.

    Raises
    ------
    ValueError
        ``out`` is too small.
    """
    if is_latent(bounds.head_dim_v):
        return write_header(bounds, seqused_k, cu_seqlens_q, out, stream)
    device = device_for(seqused_k)
    problem = _problem(bounds)
    size = _HEADER + bounds.batch + PREFIX_EXTRA
    if bounds.batch <= LARGEST_SCAN or decode_refusal(problem, device.info):
        return write_header(bounds, seqused_k, cu_seqlens_q, out, stream)
    if out is None:
        with on_stream(seqused_k, stream):
            out = array_module(seqused_k).empty(size, np.int32)
    elif out.size < size:
        raise ValueError(f"out holds {out.size} int32; a batch of {bounds.batch} needs {size}")
    write_header(bounds, seqused_k, cu_seqlens_q, out, stream)
    plan = make_decode_plan(problem, device.info)
    values = dict.fromkeys(ATTENTION_PARAMS.names, 0)
    values.update(
        cu_seqlens_q=0 if cu_seqlens_q is None else device.pointer(cu_seqlens_q),
        seqused_k=device.pointer(seqused_k),
        batch=bounds.batch,
        group=problem.group_size,
        window_left=_reach(bounds, bounds.window_left),
        window_right=_reach(bounds, bounds.window_right),
    )
    table = device.pointer(out) + HEADER_BYTES
    packed = (
        ATTENTION_PARAMS.pack(*values.values()),
        DECODE_PARAMS.pack(0, 0, 0, table, 0, *plan.numbers, 0, 0, *plan.times),
    )
    args = KernelArgs(packed, (seqused_k, cu_seqlens_q, out))
    launch(device, plan.schedule, args, stream_handle(stream))
    return out


def _reach(bounds: Any, window: int) -> int:
    """-1 also where it goes past every key, so that sums cannot overflow."""
    return -1 if window >= bounds.max_seqlen_q + bounds.max_seqlen_k else window


def _problem(bounds: Any) -> AttentionProblem:
    return AttentionBounds(
        batch_size=bounds.batch,
        max_seqlen_q=bounds.max_seqlen_q,
        max_seqlen_k=bounds.max_seqlen_k,
        num_heads_q=bounds.num_heads_q,
        num_heads_kv=bounds.num_heads_kv,
        headdim=bounds.head_dim,
        headdim_v=bounds.head_dim_v,
        kv_dtype=bounds.kv_type.name,
        dtype="bfloat16" if bounds.kv_type.is_fp8 else bounds.kv_type.name,
        page_size=bounds.page_size,
        window_size=(bounds.window_left, bounds.window_right),
        num_splits=bounds.num_splits,
    ).problem()
