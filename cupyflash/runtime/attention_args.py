"""What every attention kernel is passed: one `AttentionParams`, and the results it writes to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .attention_plan import ATTENTION_PARAMS
from .call import Call
from .device import Device
from .dtypes import FP32, scalar_type
from .problem import AttentionProblem

__all__ = ["Tiling", "arrays_of", "pack_attention", "results"]


class Tiling(NamedTuple):
    """What a plan tells the kernels besides the problem; see `attention_plan.AttentionPlan`.

    Attributes
    ----------
    chunk : int
        Keys a split takes at most.
    blocks_a_request : int
        Row blocks of every request; 0 where the kernel finds its request by ``cu_seqlens_q``.
    row_block : int
        Rows (token and head of a group) of a block.
    partial_rows : int
        Rows of all partial results together: where the log-sum-exps lie in the scratch memory.
    """

    chunk: int
    blocks_a_request: int
    row_block: int
    partial_rows: int


def results(call: Call, device: Device, stream: int | None) -> tuple[Any, Any]:
    """``out`` and ``lse`` (None where it is not wanted): the caller's, or new ones."""
    problem, arrays = call.problem, call.arrays
    out, lse = arrays.out, arrays.lse
    if out is None:
        shape = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        out = device.empty(shape, problem.out_type.numpy, stream)
    if lse is None and problem.wants_lse:
        lse = device.empty((problem.num_heads_q, problem.total_q), np.dtype(np.float32), stream)
    return out, lse


def arrays_of(call: Call, *more: Any) -> tuple[Any, ...]:
    """Every array that a launch of the call may touch, for `params.KernelArgs`."""
    used = (*call.arrays, *call.descales, *more)
    return tuple(a for a in used if hasattr(a, "dtype"))


def pack_attention(
    call: Call, device: Device, out: Any, lse: Any, scratch: Any, tiling: Tiling
) -> np.ndarray[Any, Any]:
    """The `AttentionParams` of a call.

    Parameters
    ----------
    out, lse : array
        From `results`; ``lse`` may be None.
    scratch : array, uint8, or None
        Partial results: ``tiling.partial_rows * head_dim_v`` float32, and as many rows of
        log-sum-exps behind them.
    tiling : Tiling
    """

    def pointer(array: Any) -> int:
        return 0 if array is None else device.pointer(array)

    problem, arrays = call.problem, call.arrays
    q, k, v = arrays.q, arrays.k, arrays.v
    alibi, sink, table = arrays.alibi_slopes, arrays.s_aux, arrays.block_table
    scales = [d if hasattr(d, "dtype") else None for d in call.descales]
    numbers = [1.0 if d is None or hasattr(d, "dtype") else d for d in call.descales]
    partial_out = pointer(scratch)
    partial_lse = partial_out + tiling.partial_rows * problem.head_dim_v * 4
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
        tiling.chunk,
        tiling.blocks_a_request,
        tiling.row_block,
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
