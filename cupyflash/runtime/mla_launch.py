"""Launching multi-head latent attention; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .call import Call
from .device import Device, DeviceInfo, device_for
from .divisors import inverse
from .key_maps import key_map, tma_refusal
from .latent_params import LATENT_PARAMS
from .latent_plan import LatentPlan, box_keys, box_panels, latent_refusal, make_latent_plan
from .launch import stream_handle
from .layout import Layout
from .mla_plan import MlaPlan, make_mla_plan
from .tensor_map import PROMOTE_128B, SWIZZLE_128B, ZERO_FILL
from .work import Work, queue_work, usable_bytes

__all__ = ["attend_latent"]

_WIDE = 16


def attend_latent(call: Call, workspace: Any, stream: Any, hopper: bool = False) -> tuple[Any, Any]:
    """Queue latent attention of every request.

    Parameters
    ----------
    call : Call
        With ``q_v``.
    workspace : array [nbytes], uint8, optional
        Scratch; keys are split into fewer pieces where it is small. The device's own if None.
    stream : int or stream, optional
    hopper : bool
        Use the kernel of compute capability 9.0 where it is made for the call.

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
    device, given = device_for(call.arrays.q), stream_handle(stream)
    limit = usable_bytes(call, device, workspace)
    by_tma = _latent_plan(call, device, limit) if hopper else None
    plan = by_tma or _plan(call.layout, device.info, limit)
    nbytes = (plan.attend if isinstance(plan, LatentPlan) else plan.forward).workspace_bytes
    queue = device.current_stream() if given is None else given
    return queue_work(call, device, queue, workspace, nbytes, lambda work: _queue(work, plan))


def _latent_plan(call: Call, device: Device, limit: int | None) -> LatentPlan | None:
    """Of the Hopper kernel, if it is made for the call."""
    starts = device.pointer(call.arrays.k) | device.pointer(call.arrays.v)
    if starts % _WIDE or not _has_boxes(call.layout):
        return None
    problem, info = call.layout.problem, device.info
    key = ("latent", info, limit)
    found: LatentPlan | None = call.layout.kept.get(key)
    if found is None and not latent_refusal(problem, info):
        found = call.layout.keep(key, lambda: make_latent_plan(problem, info, limit))
    return found


def _has_boxes(layout: Layout) -> bool:
    """Whether TMA can read the keys: rows at multiples of 16 bytes, strides that it takes."""
    found = layout.kept.get("latent boxes")
    if found is None:
        refused = tma_refusal(layout, (0, 0), ("k", "v"))
        found = layout.keep("latent boxes", lambda: not refused)
    return bool(found)


def _plan(layout: Layout, info: DeviceInfo, limit: int | None) -> MlaPlan:
    key = ("mla", info, limit)
    found: MlaPlan | None = layout.kept.get(key)
    return found or layout.keep(key, lambda: make_mla_plan(layout.problem, info, limit))


def _pack(call: Call, device: Device, side: int = 0) -> bytes:
    """The `LatentParams` of a call."""
    q_v, k = call.arrays.q_v, call.arrays.k
    start, (token, head, _) = device.pointer(q_v), q_v.strides
    vectorised = (start | token | head) % _WIDE == 0
    page = call.problem.page_size
    outside = 1 if page is None else k.shape[0]
    return LATENT_PARAMS.pack(
        *(start, token, head, vectorised),
        *(box_keys(page), box_panels(call.problem), outside, side, inverse(page or 1)),
    )


def _key_map(call: Call, device: Device, array: Any, panels: int) -> bytes:
    """Of keys; a box is one panel of the keys of a block, or several one after the other."""
    spec, keys = (array.shape, array.dtype, array.strides), box_keys(call.problem.page_size)
    kind, shape, strides, box = key_map(spec, panels, keys, panels > 1)
    return device.encode_tensor_map(
        array, kind, device.pointer(array), shape, strides, box,
        SWIZZLE_128B, PROMOTE_128B, ZERO_FILL,
    )  # fmt: skip


def _queue(work: Work, plan: MlaPlan | LatentPlan) -> None:
    if isinstance(plan, LatentPlan):
        _queue_hopper(work, plan)
        return
    packed, used = work.pack(plan.tiling, work.block), work.touched(work.block)
    work.launch(plan.forward, (packed, _pack(work.call, work.device)), used)
    if plan.combine is not None:
        work.launch(plan.combine, (packed,), used)


def _queue_hopper(work: Work, plan: LatentPlan) -> None:
    call, device, block, counters = work.call, work.device, work.block, work.counters
    packed, used = work.pack(), work.touched(block, counters)
    at = plan.memory.pointers(device, block, counters)
    spans = plan.pack(at)
    if at.cleared:
        work.launch(plan.schedule, (packed, spans), used)
    values = packed, spans, _pack(call, device, plan.side)
    panels = box_panels(call.problem)
    maps = (
        _key_map(call, device, call.arrays.k, 1),
        _key_map(call, device, call.arrays.v, panels),
    )
    work.launch(plan.attend, (*values, *maps), used)
