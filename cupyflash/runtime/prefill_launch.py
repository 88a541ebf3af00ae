"""Launching the Hopper prefill kernel; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .arrays import ArraySpec, AttentionArrays
from .call import Call
from .device import Device
from .dtypes import ScalarType
from .layout import Layout
from .prefill_plan import PREFILL_PARAMS, PrefillPlan
from .prefill_tile import FP8_PREFILL_PARAMS
from .tensor_map import (
    PROMOTE_128B,
    SWIZZLE_128B,
    UINT8,
    UINT16,
    ZERO_FILL,
)
from .work import Work, queue_work
from .workspace import COUNTERS

__all__ = ["attend_prefill"]

_PANEL = 128  # bytes of a row of a box
_WIDE = 16

Map = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # shape, strides, box


def _row_map(spec: Any, rows: int, pack: int) -> Map:
    """Of [tokens, heads, dim]: (element, head, token); a box is 128 bytes of a tile's rows."""
    (tokens, heads, dim), dtype, strides = spec
    return (
        (dim, heads, tokens),
        (_step(heads, strides[1]), _step(tokens, strides[0])),
        (_PANEL // dtype.itemsize, pack, rows // pack),
    )


def _new_out(layout: Layout) -> ArraySpec:
    """The spec of results that the launch allocates."""
    shape, dtype = layout.out_shape, layout.problem.out_type.numpy
    head = shape[2] * dtype.itemsize
    return ArraySpec(shape, dtype, (shape[1] * head, head, dtype.itemsize))


def _key_map(spec: Any, box_keys: int) -> Map:
    """Of [blocks, slots, heads, dim] or [tokens, heads, dim]: (element, slot, head, block)."""
    shape, dtype, strides = spec
    if len(shape) == 3:
        shape, strides = (1, *shape), (_WIDE, *strides)
    blocks, slots, heads, dim = shape
    return (
        (dim, slots, heads, blocks),
        (_step(slots, strides[1]), _step(heads, strides[2]), _step(blocks, strides[0])),
        (_PANEL // dtype.itemsize, box_keys, 1, 1),
    )


def _kind(scalar: ScalarType) -> int:
    return UINT8 if scalar.is_fp8 else UINT16


def _step(count: int, stride: int) -> int:
    """The stride of a dimension; any that the driver takes where there is one element."""
    return _WIDE if count == 1 else stride


def _placement(layout: Layout, plan: PrefillPlan) -> tuple[tuple[Map, ...], int]:
    """The tensor maps of q, k, v and, of 16-bit arrays, out; a page past the last one."""
    arrays = AttentionArrays(*layout.specs)
    maps = [
        _row_map(arrays.q, plan.rows, plan.pack),
        _key_map(arrays.k, plan.box_keys),
        _key_map(arrays.v, plan.box_keys),
    ]
    if not layout.problem.q_type.is_fp8:
        maps.append(_row_map(arrays.out or _new_out(layout), plan.rows, plan.pack))
    paged = layout.problem.page_size is not None
    return tuple(maps), arrays.k[0][0] if paged else 1


def attend_prefill(
    call: Call,
    plan: PrefillPlan,
    device: Device,
    workspace: Any,
    stream: int,
    found: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Queue attention of every request.

    Parameters
    ----------
    call : Call
        Neither ``prefill_refusal`` nor ``tma_refusal`` has anything against it.
    plan : PrefillPlan
    device : Device
    workspace : array [nbytes], uint8, optional
        Scratch of at least ``plan.attend.workspace_bytes``; the device's own if None.
    stream : int
    found : tuple, optional
        Where to write: ``out`` and ``lse`` of another launch that serves part of the requests.

    Returns
    -------
    out : array [total_q, num_heads_q, head_dim_v]
    lse : array [num_heads_q, total_q], float32, or None

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    return queue_work(
        call, device, stream, workspace, plan.attend.workspace_bytes,
        lambda work: _queue(work, plan), found=found, counts=True,
    )  # fmt: skip


def _queue(work: Work, plan: PrefillPlan) -> None:
    device, block, counters = work.device, work.block, work.counters
    layout, arrays = work.call.layout, work.call.arrays
    placed = layout.kept.get(plan) or layout.keep(plan, lambda: _placement(layout, plan))
    maps, outside = placed
    partial = block[plan.workspace_at :] if plan.combine is not None else None
    packed = work.pack(plan.tiling, partial)
    counter = device.pointer(counters) + 4 * (COUNTERS - 1)
    pieces = device.pointer(block) + plan.workspace_at
    own = (counter, pieces + plan.partial_bytes, *plan.numbers, outside, plan.tiling.skipped_rows)
    if layout.problem.q_type.is_fp8:
        tail = (*plan.tail, plan.tail.inverse)
        struct = FP8_PREFILL_PARAMS.pack(*own, pieces, device.pointer(counters), *tail)
    else:
        struct = PREFILL_PARAMS.pack(*own)
    rows, keys = (_kind(kind) for kind in (layout.problem.q_type, layout.problem.kv_type))
    encoded = tuple(
        device.encode_tensor_map(
            array, kind, device.pointer(array), shape, strides, box,
            SWIZZLE_128B, PROMOTE_128B, ZERO_FILL,
        )
        for array, kind, (shape, strides, box) in zip(
            (arrays.q, arrays.k, arrays.v, work.out), (rows, keys, keys, rows), maps, strict=False
        )
    )  # fmt: skip
    used = work.touched(block, counters)
    work.launch(plan.attend, (packed, struct, *encoded), used)
    if plan.combine is not None:
        work.launch(plan.combine, (packed,), used)
