"""Launching multi-head latent attention on the portable kernel; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .attention_args import arrays_of, pack_attention, results
from .attention_launch import usable_bytes
from .call import Call
from .device import Device, DeviceInfo, device_for
from .launch import launch, stream_handle
from .layout import Layout
from .mla_plan import LATENT_PARAMS, MlaPlan, make_mla_plan
from .params import KernelArgs
from .workspace import scratch_of

__all__ = ["attend_latent", "pack_latent"]

_WIDE = 16


def attend_latent(call: Call, workspace: Any, stream: Any) -> tuple[Any, Any]:
    """Queue latent attention of every request.

    Parameters
    ----------
    call : Call
        With ``q_v``.
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
    device, given = device_for(call.arrays.q), stream_handle(stream)
    plan = _plan(call.layout, device.info, usable_bytes(call, device, workspace))
    found = results(call, device, given)
    queue = device.current_stream() if given is None else given
    if plan.combine is None:
        _queue(call, plan, device, found, None, queue)
    elif workspace is not None:
        _queue(call, plan, device, found, workspace, queue)
    else:
        with scratch_of(device, queue) as scratch:
            block = scratch.reserve(plan.forward.workspace_bytes)
            _queue(call, plan, device, found, block, queue)
    return found


def _plan(layout: Layout, info: DeviceInfo, limit: int | None) -> MlaPlan:
    limits = () if limit is None else (limit,)
    return layout.kept.get(("mla", info, limit)) or layout.keep(
        ("mla", info, limit), lambda: make_mla_plan(layout.problem, info, *limits)
    )


def pack_latent(call: Call, device: Device) -> bytes:
    """The `LatentParams` of a call."""
    q_v = call.arrays.q_v
    start, (token, head, _) = device.pointer(q_v), q_v.strides
    return LATENT_PARAMS.pack(start, token, head, (start | token | head) % _WIDE == 0, 0, 0, 0)


def _queue(
    call: Call, plan: MlaPlan, device: Device, found: tuple[Any, Any], scratch: Any, stream: int
) -> None:
    packed = pack_attention(call, device, *found, scratch, plan.tiling)
    used = arrays_of(call, *found, scratch)
    launch(device, plan.forward, KernelArgs((packed, pack_latent(call, device)), used), stream)
    if plan.combine is not None:
        launch(device, plan.combine, KernelArgs((packed,), used), stream)
