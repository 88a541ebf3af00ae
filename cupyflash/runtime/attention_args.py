"""What every attention kernel is passed: one `AttentionParams`, and the results it writes to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import AttentionArrays
from .attention_params import ATTENTION_PARAMS
from .call import Call
from .device import Device
from .dtypes import FP32, scalar_type
from .layout import Layout
from .problem import AttentionProblem

__all__ = ["Tiling", "arrays_of", "pack_attention", "results"]

_FLOAT32 = np.dtype(np.float32)
_NO_SCALES = (0, 0, 0)
_WIDE = 16  # bytes of the widest access


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
    skipped_rows : int
        Requests of so many rows are left to another launch.
    """

    chunk: int
    blocks_a_request: int
    row_block: int
    partial_rows: int
    skipped_rows: int = 0


def results(call: Call, device: Device, stream: int | None) -> tuple[Any, Any]:
    """``out`` and ``lse`` (None where it is not wanted): the caller's, or new ones."""
    arrays, layout = call.arrays, call.layout
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = device.empty(layout.out_shape, layout.problem.out_type.numpy, stream)
    if lse is None and layout.problem.wants_lse:
        lse = device.empty(layout.lse_shape, _FLOAT32, stream)
    return out, lse


def arrays_of(call: Call, *more: Any) -> tuple[Any, ...]:
    """Everything that a launch of the call may touch, for `params.KernelArgs`."""
    return (*call.arrays, *call.descales, *more)


def pack_attention(
    call: Call, device: Device, out: Any, lse: Any, scratch: Any, tiling: Tiling
) -> bytes:
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
    shape: _Shape = call.layout.kept.get(tiling) or _keep_shape(call.layout, tiling)
    q, k, v, cu_q, cu_k, used, table, alibi, sink = call.arrays[:9]
    at = device.pointer
    at_q, at_k, at_v, at_out = at(q), at(k), at(v), at(out)
    wide = (at_q | at_k | at_v | at_out) % _WIDE == 0
    tail = shape.aligned if wide else shape.tail(at_q, at_k, at_v, at_out)
    scales: tuple[int, ...] = _NO_SCALES
    if shape.scale_arrays:
        scales = tuple([0 if s is None or type(s) is float else at(s) for s in call.descales])
    partial_out = 0 if scratch is None else at(scratch)
    return ATTENTION_PARAMS.pack_head(
        tail,
        at_q,
        at_k,
        at_v,
        at_out,
        0 if lse is None else at(lse),
        at(cu_q),
        0 if cu_k is None else at(cu_k),
        0 if used is None else at(used),
        0 if table is None else at(table),
        0 if alibi is None else at(alibi),
        0 if sink is None else at(sink),
        *scales,
        partial_out,
        partial_out and partial_out + shape.partial_lse_offset,
    )


def _keep_shape(layout: Layout, tiling: Tiling) -> _Shape:
    return layout.keep(tiling, lambda: _Shape(layout, tiling))


class _Shape:
    """The fields that do not depend on addresses."""

    def __init__(self, layout: Layout, tiling: Tiling) -> None:
        problem, scales = layout.problem, layout.scales
        arrays = AttentionArrays(*layout.specs)
        self.scale_arrays = any(type(scale) is tuple for scale in scales)
        self.partial_lse_offset = tiling.partial_rows * problem.head_dim_v * 4
        out = arrays.out or _contiguous(layout.out_shape, problem.out_type.numpy)
        lse = arrays.lse
        if lse is None and problem.wants_lse:
            lse = _contiguous(layout.lse_shape, _FLOAT32)
        self._strides = _strides(arrays, out, lse, scales)
        self._numbers = _numbers(problem, arrays, tiling)
        self._floats, self._skipped = _floats(problem, scales), tiling.skipped_rows
        self._widths = [
            (_joined(spec), nbytes)
            for spec, nbytes in (
                (arrays.q, 8 * arrays.q[1].itemsize),
                *((spec, _WIDE) for spec in (arrays.k, arrays.v)),
                (out, 4),
            )
        ]
        self.aligned = self.tail(0, 0, 0, 0)

    def tail(self, *starts: int) -> bytes:
        """Those fields, for q, k, v and out at these addresses."""
        vectorised = [
            (start | strides) % nbytes == 0
            for start, (strides, nbytes) in zip(starts, self._widths, strict=True)
        ]
        return ATTENTION_PARAMS.pack_tail(
            *self._strides, *self._numbers, *vectorised, *self._floats, self._skipped
        )


Spec = tuple[tuple[int, ...], Any, tuple[int, ...]]


def _contiguous(shape: tuple[int, ...], dtype: Any) -> Spec:
    strides = [int(dtype.itemsize)]
    for count in shape[:0:-1]:
        strides.insert(0, strides[0] * count)
    return shape, dtype, tuple(strides)


def _joined(spec: Spec) -> int:
    """The bits that any row's address has besides the first one's."""
    bits = 0
    for stride in spec[2][:-1]:
        bits |= stride
    return bits


def _strides(
    arrays: AttentionArrays, out: Spec, lse: Spec | None, scales: tuple[Any, ...]
) -> tuple[int, ...]:
    table, alibi, sink = arrays.block_table, arrays.alibi_slopes, arrays.s_aux
    return (
        *arrays.q[2][:2],
        *_cache_strides(arrays.k),
        *_cache_strides(arrays.v),
        *out[2][:2],
        *((0, 0) if lse is None else lse[2]),
        0 if table is None else table[2][0],
        *((0, 0) if alibi is None else (0, *alibi[2])[-2:]),
        0 if sink is None else sink[2][0],
        *(stride for scale in scales for stride in _descale_strides(scale)),
    )


def _numbers(problem: AttentionProblem, arrays: AttentionArrays, tiling: Tiling) -> tuple[int, ...]:
    sink_type = None if arrays.s_aux is None else scalar_type(arrays.s_aux[1])
    return (
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
    )


def _floats(problem: AttentionProblem, scales: tuple[Any, ...]) -> tuple[float, ...]:
    q, k, v = (scale if type(scale) is float else 1.0 for scale in scales)
    return problem.softmax_scale * q * k, v, problem.softcap


def _cache_strides(spec: Spec) -> tuple[int, ...]:
    """Of (block, token, head)."""
    strides = spec[2]
    return strides[:3] if len(strides) == 4 else (0, *strides[:2])


def _descale_strides(scale: Any) -> tuple[int, int]:
    """Of (request, head); one value serves all."""
    if type(scale) is not tuple or len(scale[2]) < 2:
        return 0, 0
    return scale[2][0], scale[2][1]


def _window(problem: AttentionProblem) -> tuple[int, int]:
    """Left and right reach; -1 also where it goes past every key, so that sums cannot overflow."""
    far = problem.max_seqlen_q + problem.max_seqlen_k
    left, right = problem.window_left, problem.window_right
    return (-1 if left >= far else left), (-1 if right >= far else right)
