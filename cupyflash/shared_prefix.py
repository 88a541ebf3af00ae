"""Attention that reads shared keys once: one launch where the kernel serves a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .bounds import AttentionBounds
from .fa_version import capability_of, resolve_version
from .prefix_search import check_tables, find_prefix_tree, null_entry, tree_beside
from .prefix_tree import PrefixTree
from .runtime.arrays import place, spec_of
from .runtime.call import Call
from .runtime.device import Device, device_for
from .runtime.key_maps import tma_refusal
from .runtime.launch import stream_handle
from .runtime.placement import check_apart
from .runtime.prefix_search import SEARCH_THREADS, Search
from .runtime.problem import AttentionProblem
from .runtime.rules.prefix import check_schedule_buffer, prefix_blocks
from .runtime.rules.sequences import check_lengths
from .runtime.shared_launch import Sharing, attend_shared, schedule_shared, share_prefixes
from .runtime.shared_plan import SharedPlan, make_shared_plan, shared_refusal
from .side_stream import SideStream

__all__ = ["PrefixSchedule", "attend_once", "get_prefix_schedule", "sharing_of_tree"]


@dataclass(frozen=True, eq=False)
class PrefixSchedule:
    """Who reads which shared and own keys in a step, for all of its layers.

    Attributes
    ----------
    buffer : array [nbytes], uint8
        The schedule, and room for partial results.
    needs : tuple
        What the calls must have in common with it.
    side : SideStream, optional
        Where it was made, if beside the stream of the calls: the first of them waits.
    """

    buffer: Any
    needs: tuple[Any, ...]
    side: SideStream | None = None


def _needs(problem: AttentionProblem, plan: SharedPlan, sharing: Sharing) -> tuple[Any, ...]:
    return (
        plan.sizes,
        plan.tile.keys,
        plan.tile_rows,
        plan.row_block,
        plan.row_blocks,
        plan.levels,
        problem.batch,
        problem.group_size,
        problem.num_splits,
        problem.window_right >= 0,
        problem.window_left,
        sharing.common_keys,
        sharing.added_keys,
    )


def get_prefix_schedule(
    batch_size: int,
    total_q: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    suffix_kv_lens: Any,
    qkv_dtype: Any,
    cu_seqlens_q: Any,
    page_size: int,
    *,
    headdim_v: int | None = None,
    common_prefix_len: int = 0,
    prefix_tree: PrefixTree | None = None,
    block_table: Any = None,
    null_block: int | None = None,
    sliding_window: tuple[int, int] | None = None,
    num_splits: int = 0,
    out: Any = None,
    stream: Any = None,
) -> PrefixSchedule | None:
    """The schedule that the calls of `cascade_attention` in one step share.

    It is made on the device from the lengths; without it every call makes it anew.

    Parameters
    ----------
    batch_size, total_q, max_seqlen_q, max_seqlen_k : int
        As the calls will have them: ``len(query)``, ``max_query_len``, ``max_kv_len``.
    num_heads_q, num_heads_kv, headdim : int
    suffix_kv_lens : array [batch], int32
    qkv_dtype : str or dtype
        Of the cache.
    cu_seqlens_q : array [batch + 1], int32
    page_size : int
    headdim_v : int, optional
        `headdim` if None.
    common_prefix_len, prefix_tree, sliding_window, num_splits
        As the calls will pass them.
    block_table : array [batch, max_blocks], int32, optional
        The tree is found first, as `find_prefix_tree` finds it, and written to the ``buffer`` of
        `prefix_tree`; up to 512 requests in the same launch.
    null_block : int, optional
        As `find_prefix_tree`.
    out : array [nbytes], uint8, optional
        The ``buffer`` of an earlier schedule, so that its address stays (CUDA graphs). New if None.
    stream : int or stream, optional
        A `SideStream` hides it behind the launches in front of the step's first attention.

    Returns
    -------
    PrefixSchedule or None
        For ``prefix_scheduler_metadata``. None where calls of this kind need none. Calls keep
        partial results in it, so those of one schedule must not run on two streams at once.

    Raises
    ------
    TypeError, ValueError
        Bounds that no call could have, lengths of another dtype or size, a prefix that is not whole
        blocks, a tree of another batch, a buffer that is not contiguous uint8 from a multiple of 16
        bytes on or is too small (says the size needed).
    """
    names = ("suffix_kv_lens", "cu_seqlens_q", "out", "block_table")
    (lengths, starts, out, table), on_host = place(
        names, (suffix_kv_lens, cu_seqlens_q, out, block_table), stream, required=2
    )
    problem = AttentionBounds(
        batch_size=batch_size,
        total_q=total_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        headdim=headdim,
        headdim_v=headdim_v,
        dtype=qkv_dtype,
        page_size=page_size,
        causal=True,
        window_size=sliding_window or (-1, -1),
        num_splits=num_splits,
    ).problem()
    check_lengths("suffix_kv_lens", spec_of(lengths), batch_size)
    check_lengths("cu_seqlens_q", spec_of(starts), batch_size + 1)
    _check_shared(common_prefix_len, prefix_tree, batch_size, page_size, max_seqlen_k)
    if table is not None:
        if prefix_tree is None:
            raise ValueError(
                f"block_table: pass a prefix_tree of {batch_size} requests to write to"
            )
        check_tables(table, lengths, starts, page_size, prefix_tree.levels, null_block)
        tree_beside(batch_size, prefix_tree.levels, prefix_tree.buffer, table, lengths, starts)

    def find() -> None:
        if table is not None and prefix_tree is not None:
            find_prefix_tree(
                table, lengths, page_size, starts, levels=prefix_tree.levels,
                null_block=null_block, out=prefix_tree.buffer, stream=stream,
            )  # fmt: skip

    if on_host:
        find()
        return None
    if prefix_tree is None:
        sharing = Sharing(common_keys=common_prefix_len, added_keys=common_prefix_len)
    else:
        sharing = sharing_of_tree(prefix_tree)
    device = device_for(lengths)
    if shared_refusal(problem, device.info, sharing.levels):
        find()
        return None
    plan = make_shared_plan(problem, device.info, sharing.levels)
    given = stream_handle(stream)
    queue = device.current_stream() if given is None else given
    nbytes = plan.attend.workspace_bytes
    if out is None:
        out = device.empty((nbytes,), np.dtype(np.uint8), queue)
    else:
        check_schedule_buffer(out, nbytes)
    if prefix_tree is None or table is None or batch_size > SEARCH_THREADS:
        find()
        schedule_shared(problem, plan, sharing, device, (starts, lengths), out, queue)
    else:
        null, into = null_entry(null_block), prefix_tree.buffer
        search = Search(table, starts, lengths, page_size, null, into, prefix_tree.levels)
        share_prefixes(problem, plan, search, device, out, queue)
    side = stream if isinstance(stream, SideStream) else None
    if side is not None:
        side.queued()
    return PrefixSchedule(out, _needs(problem, plan, sharing), side)


def _check_shared(
    common_prefix_len: int,
    tree: PrefixTree | None,
    batch: int,
    page_size: int,
    max_seqlen_k: int,
) -> None:
    if tree is None:
        prefix_blocks(common_prefix_len, page_size, max_seqlen_k)
        return
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"prefix_tree is {type(tree).__name__}; make one by find_prefix_tree")
    if common_prefix_len:
        raise ValueError(
            f"prefix_tree with common_prefix_len={common_prefix_len}: the tree says what is "
            "shared; use 0"
        )
    if tree.batch != batch:
        raise ValueError(f"prefix_tree is of {tree.batch} requests, the calls of {batch}")


def sharing_of_tree(tree: PrefixTree) -> Sharing:
    """What a launch is told of a tree."""
    return Sharing(tree.levels, 0, 0, tree.order, tree.nodes)


def attend_once(
    call: Call,
    sharing: Sharing,
    fa_version: int | None,
    stream: Any,
    schedule: PrefixSchedule | None = None,
) -> str:
    """Queue attention of a call in which each shared key is read once.

    Parameters
    ----------
    call : Call
        On a GPU; its lengths are without ``sharing.added_keys``, its bounds with them.
    sharing : Sharing
    fa_version : int, optional
    stream : int or stream, optional
    schedule : PrefixSchedule, optional
        Made for such calls.

    Returns
    -------
    str
        Empty; or why the kernel does not serve the call, and then nothing was queued.

    Raises
    ------
    ValueError, NotImplementedError
        As `resolve_version`; or the schedule is for other calls.
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    if resolve_version(call.problem, capability_of(call.arrays.q), fa_version) != 3:
        return "version 2 has no kernel for it"
    device = device_for(call.arrays.q)
    refused = _refusal(call, device, sharing.levels)
    if refused:
        return refused
    plan = make_shared_plan(call.problem, device.info, sharing.levels)
    if schedule is not None and schedule.needs != _needs(call.problem, plan, sharing):
        raise ValueError(
            "prefix_scheduler_metadata was made for other calls: batch, queries, heads, head size, "
            "prefix or number of splits differ; use get_prefix_schedule with those of this call"
        )
    if schedule is not None and call.arrays.out is not None:
        check_apart(("out", "the schedule"), call.arrays.out, schedule.buffer)
    given = stream_handle(stream)
    queue = device.current_stream() if given is None else given
    made = None if schedule is None else schedule.buffer
    if schedule is not None and schedule.side is not None:
        schedule.side.join_once(queue)
    attend_shared(call, plan, sharing, device, made, queue, schedule is not None)
    return ""


def _refusal(call: Call, device: Device, levels: int) -> str:
    layout, arrays, at = call.layout, call.arrays, device.pointer
    starts = tuple(at(array) % 16 for array in (arrays.q, arrays.k, arrays.v))
    key = ("shared", device.info, levels, starts)
    found: str | None = layout.kept.get(key)
    if found is None:
        found = layout.keep(
            key,
            lambda: (
                shared_refusal(call.problem, device.info, levels) or tma_refusal(layout, starts)
            ),
        )
    return found
