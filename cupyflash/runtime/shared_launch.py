"""Launching decoding with shared prefixes; arguments are validated already."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import AttentionArrays
from .attention_params import ATTENTION_PARAMS
from .call import Call
from .decode_tile import DECODE_PARAMS
from .device import Device
from .divisors import inverse, log2, page_shift
from .key_maps import KeyMaps, bits_of_out, key_map, prefetched_bytes
from .launch import launch
from .layout import Layout
from .params import KernelArgs
from .prefix_search import Search
from .problem import AttentionProblem
from .shared_plan import SharedPlan
from .shared_tile import SHARED_PARAMS
from .work import Work, queue_work

__all__ = ["Sharing", "attend_shared", "schedule_shared", "share_prefixes"]

_OWN_BOX = 16  # keys
_LOG2E = 1.4426950408889634
_SMALLEST_SCALE = 1e-30  # it meets -inf


class Sharing(NamedTuple):
    """Who shares what.

    Attributes
    ----------
    levels : int
    common_keys : int
        Of all requests, without a tree.
    added_keys : int
        Of every request besides ``seqused_k``.
    order : array [batch], int32, or None
    tree : array [levels, batch, 2], int32, or None
        As core/shared_params.cuh has them.
    """

    levels: int = 1
    common_keys: int = 0
    added_keys: int = 0
    order: Any = None
    tree: Any = None


class _Placement:
    """What of a call the arguments depend on besides addresses."""

    def __init__(self, layout: Layout, plan: SharedPlan) -> None:
        problem, arrays = layout.problem, AttentionArrays(*layout.specs)
        panels, head_dim = plan.tile.panels, plan.tile.head_dim
        whole = problem.head_dim == problem.head_dim_v == head_dim and plan.tile.whole_panels
        self.key_maps = KeyMaps(
            tuple(
                key_map(spec, panels, keys, split)
                for keys, split in ((_OWN_BOX, whole), (plan.box_keys, False))
                for spec in (arrays.k, arrays.v)
            )
        )
        self.out_bits, ahead = bits_of_out(layout), prefetched_bytes(layout)
        self.decode = tuple(
            _decode_params(problem, plan, whole_boxes=int(whole), out_wide=wide, table_bytes=ahead)
            for wide in (0, 1)
        )


def _decode_params(problem: AttentionProblem, plan: SharedPlan, **more: int) -> bytes:
    values = dict.fromkeys(DECODE_PARAMS.names, 0)
    values.update(
        tile_shift=log2(plan.tile.keys),
        row_block=plan.row_block,
        most_pieces=problem.num_splits,
        page_shift=page_shift(problem.page_size),
        group_inverse=inverse(problem.group_size),
        **more,
    )
    return DECODE_PARAMS.pack(*values.values())


def schedule_shared(
    problem: AttentionProblem,
    plan: SharedPlan,
    sharing: Sharing,
    device: Device,
    lengths: tuple[Any, Any],
    block: Any,
    stream: int,
) -> None:
    """Queue the schedule alone, for calls that follow with the same lengths.

    Parameters
    ----------
    problem : AttentionProblem
    plan : SharedPlan
    sharing : Sharing
    device : Device
    lengths : tuple of array
        ``cu_seqlens_q`` and ``seqused_k``.
    block : array [nbytes], uint8
        The workspace of those calls.
    stream : int

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    args = _schedule_args(problem, plan, sharing, device, lengths, block)
    launch(device, plan.schedule, args, stream)


def share_prefixes(
    problem: AttentionProblem,
    plan: SharedPlan,
    search: Search,
    device: Device,
    block: Any,
    stream: int,
) -> None:
    """Queue the search and the schedule of what it finds, in one launch.

    Parameters
    ----------
    problem : AttentionProblem
        Of no more requests than the search has threads.
    plan : SharedPlan
    search : Search
        With ``cu_seqlens_q``.
    device : Device
    block : array [nbytes], uint8
        The workspace of the calls that follow.
    stream : int

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    sharing = Sharing(search.levels)
    lengths = search.cu_seqlens_q, search.seqused_k
    made = _schedule_args(problem, plan, sharing, device, lengths, block)
    args = KernelArgs((*made.values, search.pack(device)), (*made.arrays, *search.arrays))
    launch(device, plan.search, args, stream)


def _schedule_args(
    problem: AttentionProblem,
    plan: SharedPlan,
    sharing: Sharing,
    device: Device,
    lengths: tuple[Any, Any],
    block: Any,
) -> KernelArgs:
    values = dict.fromkeys(ATTENTION_PARAMS.names, 0)
    values.update(
        cu_seqlens_q=device.pointer(lengths[0]),
        seqused_k=device.pointer(lengths[1]),
        batch=problem.batch,
        total_q=problem.total_q,
        heads_q=problem.num_heads_q,
        heads_kv=problem.num_heads_kv,
        group=problem.group_size,
        window_left=problem.window_left,
        window_right=problem.window_right,
    )
    packed = (
        ATTENTION_PARAMS.pack(*values.values()),
        _decode_params(problem, plan),
        _pack(problem, plan, sharing, device, block),
    )
    return KernelArgs(packed, (*lengths, block, sharing.order, sharing.tree))


def attend_shared(
    call: Call,
    plan: SharedPlan,
    sharing: Sharing,
    device: Device,
    workspace: Any,
    stream: int,
    scheduled: bool = False,
) -> tuple[Any, Any]:
    """Queue attention of every request, what is shared read once.

    Parameters
    ----------
    call : Call
        Neither ``shared_refusal`` nor ``tma_refusal`` has anything against it.
    plan : SharedPlan
    sharing : Sharing
    device : Device
    workspace : array [nbytes], uint8, optional
        Scratch of at least ``plan.attend.workspace_bytes``; the device's own if None.
    stream : int
    scheduled : bool
        The schedule is in the workspace already.

    Returns
    -------
    out : array [total_q, num_heads_q, head_dim_v]
    lse : array [num_heads_q, total_q], float32, or None

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    made = scheduled and workspace is not None
    return queue_work(
        call, device, stream, workspace, plan.attend.workspace_bytes,
        lambda work: _queue(work, plan, sharing, made),
    )  # fmt: skip


def _queue(work: Work, plan: SharedPlan, sharing: Sharing, scheduled: bool) -> None:
    call, device, layout, block = work.call, work.device, work.call.layout, work.block
    counters = work.counters if plan.inside else None  # it makes its own schedule with them
    placed: _Placement = layout.kept.get(plan) or layout.keep(
        plan, lambda: _Placement(layout, plan)
    )
    arrays = work.touched(block, sharing.order, sharing.tree, counters)
    attention = work.pack()
    wide = (device.pointer(work.out) | placed.out_bits) % 8 == 0
    shared = _pack(call.problem, plan, sharing, device, block, counters)
    common = attention, placed.decode[wide], shared
    if not scheduled and counters is None:
        work.launch(plan.schedule, common, arrays)
    maps = placed.key_maps.at(device, call.arrays.k, call.arrays.v)
    attend = plan.attend_after if counters is None else plan.attend
    work.launch(attend, (*common, *maps), arrays)


def _pack(
    problem: AttentionProblem,
    plan: SharedPlan,
    sharing: Sharing,
    device: Device,
    block: Any,
    counters: Any = None,
) -> bytes:
    values: dict[str, Any] = dict.fromkeys(SHARED_PARAMS.names, 0)
    # Of 8-bit caches rows have scales of their own, with descales, which come first.
    scale = 1.0 if problem.kv_type.is_fp8 else max(abs(problem.softmax_scale), _SMALLEST_SCALE)
    cap = problem.softcap
    at = device.pointer(block)
    for name, nbytes in plan.sizes:
        values[name] = at
        at += nbytes
    for name, array in (("order", sharing.order), ("tree", sharing.tree)):
        values[name] = 0 if array is None else device.pointer(array)
    if counters is not None:
        values["arrivals"] = device.pointer(counters)
    values.update(
        levels=plan.levels,
        common_keys=sharing.common_keys,
        added_keys=sharing.added_keys,
        box_shift=log2(plan.box_keys),
        tile_rows=plan.tile_rows,
        most_tokens=plan.most_tokens,
        row_blocks=plan.row_blocks,
        ahead=int(counters is None),
        near=int(not (plan.tile if counters is None else plan.inside_tile).parts),
        ctas=plan.attend.grid[0],
        scale=1.0 if cap or problem.has_alibi else scale * _LOG2E,
        modify_scale=scale / cap if cap else scale * _LOG2E,
    )
    return SHARED_PARAMS.pack(*values.values())
