"""Launching multi-head latent attention; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .arrays import AttentionArrays
from .attention_args import arrays_of, pack_attention, results
from .attention_launch import usable_bytes
from .call import Call
from .device import Device, DeviceInfo, device_for
from .launch import launch, stream_handle
from .layout import Layout
from .mla_plan import LATENT_PARAMS, MlaPlan, make_mla_plan, mla_box_keys
from .params import KernelArgs
from .tensor_map import rows_refusal
from .workspace import scratch_of

__all__ = ["attend_latent"]

_WIDE = 16
_UINT16 = 1  # CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_128B, _ZERO_FILL = 3, 2, 0


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
    starts = (device.pointer(call.arrays.k) | device.pointer(call.arrays.v)) % _WIDE
    by_tma = hopper and not starts and _has_boxes(call.layout)
    plan = _plan(call.layout, device.info, usable_bytes(call, device, workspace), by_tma)
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


def _has_boxes(layout: Layout) -> bool:
    """Whether TMA can read the keys: rows at multiples of 16 bytes, strides that it takes."""
    found = layout.kept.get("latent boxes")
    if found is None:
        arrays = AttentionArrays(*layout.specs)
        refused = rows_refusal("k", arrays.k, 0) or rows_refusal("v", arrays.v, 0)
        found = layout.keep("latent boxes", lambda: not refused)
    return bool(found)


def _plan(layout: Layout, info: DeviceInfo, limit: int | None, by_tma: bool) -> MlaPlan:
    key = ("mla", info, limit, by_tma)
    limits = {} if limit is None else {"workspace_limit": limit}
    found: MlaPlan | None = layout.kept.get(key)
    return found or layout.keep(
        key, lambda: make_mla_plan(layout.problem, info, hopper=by_tma, **limits)
    )


def _pack(call: Call, device: Device) -> bytes:
    """The `LatentParams` of a call."""
    q_v, k = call.arrays.q_v, call.arrays.k
    start, (token, head, _) = device.pointer(q_v), q_v.strides
    vectorised = (start | token | head) % _WIDE == 0
    page = call.problem.page_size
    outside = 1 if page is None else k.shape[0]
    return LATENT_PARAMS.pack(start, token, head, vectorised, mla_box_keys(page), outside, 0)


def _key_map(call: Call, device: Device, array: Any) -> bytes:
    """Of keys: (element, slot, head, block); a box is 128 bytes of the keys of a block."""
    shape, strides = array.shape, array.strides
    if len(shape) == 3:
        shape, strides = (1, *shape), (_WIDE, *strides)
    blocks, slots, heads, dim = shape
    # Any stride that the driver takes, where a dimension has one element.
    steps = [_WIDE if n == 1 else int(s) for n, s in zip(shape, strides, strict=True)]
    return device.encode_tensor_map(
        array, _UINT16, device.pointer(array), (dim, slots, heads, blocks),
        (steps[1], steps[2], steps[0]), (64, mla_box_keys(call.problem.page_size), 1, 1),
        _SWIZZLE_128B, _PROMOTE_128B, _ZERO_FILL,
    )  # fmt: skip


def _queue(
    call: Call, plan: MlaPlan, device: Device, found: tuple[Any, Any], scratch: Any, stream: int
) -> None:
    packed = pack_attention(call, device, *found, scratch, plan.tiling)
    used = arrays_of(call, *found, scratch)
    values: tuple[bytes, ...] = (packed, _pack(call, device))
    if plan.uses_tma:
        maps = tuple(_key_map(call, device, a) for a in (call.arrays.k, call.arrays.v))
        values = (*values, *maps)
    launch(device, plan.forward, KernelArgs(values, used), stream)
    if plan.combine is not None:
        launch(device, plan.combine, KernelArgs((packed,), used), stream)
