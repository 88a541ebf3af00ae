"""Launching the Hopper decode kernel; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .arrays import AttentionArrays
from .call import Call
from .decode_plan import DecodePlan
from .decode_tile import DECODE_PARAMS
from .device import Device
from .key_maps import KeyMaps, bits_of_out, key_map, prefetched_bytes, tma_refusal
from .layout import Layout
from .work import Work, queue_work
from .workspace import COUNTERS

__all__ = ["HEADER_BYTES", "attend_decode", "layout_refusal"]

HEADER_BYTES = 16
"""Of a schedule, before its table."""


class Placement:
    """What of a call the decode kernel's arguments depend on besides addresses.

    Attributes
    ----------
    key_maps : KeyMaps
        Of k and v.
    out_bits : int
        See `bits_of_out`.
    tails : tuple of bytes
        ``DecodeParams`` after its pointers, for narrow and for wide stores.
    """

    __slots__ = ("key_maps", "out_bits", "tails")

    def __init__(self, layout: Layout, plan: DecodePlan) -> None:
        arrays = AttentionArrays(*layout.specs)
        self.key_maps = KeyMaps(
            (
                key_map(arrays.k, plan.k_panels, plan.box_rows, plan.whole_boxes, plan.box_heads),
                key_map(arrays.v, plan.v_panels, plan.box_rows, plan.whole_boxes, plan.box_heads),
            )
        )
        self.out_bits = bits_of_out(layout)
        ahead = prefetched_bytes(layout)
        self.tails = tuple(
            DECODE_PARAMS.pack_tail(*plan.numbers, ahead, wide, *plan.times) for wide in (0, 1)
        )


def layout_refusal(layout: Layout, starts: tuple[int, ...]) -> str:
    """Why TMA cannot read a call's keys, or the kernel its queries; empty where both can.

    Parameters
    ----------
    layout : Layout
    starts : tuple of int
        Addresses of q, k and v.
    """
    arrays = AttentionArrays(*layout.specs)
    pair = 2 * arrays.q[1].itemsize
    if (starts[0] | arrays.q[2][0] | arrays.q[2][1]) % pair:
        return f"q: rows do not start at multiples of {pair} bytes"
    return tma_refusal(layout, starts[1:], ("k", "v"))


def attend_decode(
    call: Call, plan: DecodePlan, device: Device, table: Any, workspace: Any, stream: int
) -> tuple[Any, Any]:
    """Queue attention of every request.

    Parameters
    ----------
    call : Call
        Neither ``decode_refusal`` nor ``layout_refusal`` has anything against it.
    plan : DecodePlan
    device : Device
    table : array, int32, optional
        A schedule with the table that was made ahead.
    workspace : array [nbytes], uint8, optional
        Scratch of at least ``plan.attend.workspace_bytes``; the device's own if None.
    stream : int

    Returns
    -------
    out : array [total_q, num_heads_q, head_dim_v]
    lse : array [num_heads_q, total_q], float32, or None

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    nbytes = plan.attend.workspace_bytes
    return queue_work(
        call, device, stream, workspace, nbytes, lambda work: _queue(work, plan, table)
    )


def _queue(work: Work, plan: DecodePlan, table: Any) -> None:
    """Behind the counters there is memory for mail, which is 0 between launches too."""
    call, device, block, counters = work.call, work.device, work.block, work.counters
    layout = call.layout
    placed: Placement = layout.kept.get(plan) or layout.keep(plan, lambda: Placement(layout, plan))
    packed = work.pack()
    *partials, arrivals, made, cleared = plan.memory.pointers(device, block, counters)
    if table is not None:
        made = 0
    wide = (device.pointer(work.out) | placed.out_bits) % 8 == 0
    prefix = made if table is None else device.pointer(table) + HEADER_BYTES
    arrays = work.touched(block, counters, table)
    tail = placed.tails[wide]
    if cleared or made:
        values = DECODE_PARAMS.pack_head(tail, *partials, cleared, made, 0)
        work.launch(plan.schedule, (packed, values), arrays)
    mail = arrivals + 4 * COUNTERS if plan.mails and arrivals and not cleared else 0
    decode = DECODE_PARAMS.pack_head(tail, *partials, arrivals, prefix, mail)
    maps = placed.key_maps.at(device, call.arrays.k, call.arrays.v)
    work.launch(plan.attend, (packed, decode, *maps), arrays)
