"""Launching ``quantize_fp8``; arguments are validated already."""

from __future__ import annotations

from typing import Any

from .compile import native_arch
from .device import device_for
from .dtypes import ScalarType, scalar_type
from .launch import launch, stream_handle
from .params import KernelArgs
from .quantize_plan import QUANTIZE_PARAMS, make_quantize_plans
from .workspace import scratch_of

__all__ = ["quantize"]

_WIDE = 16
_LANES = 32


def quantize(
    x: Any,
    out: Any,
    scale: Any,
    made: Any,
    groups: int,
    out_type: ScalarType,
    rotate: bool,
    stream: Any,
) -> None:
    """Queue a conversion.

    Parameters
    ----------
    x, out : array [tokens, heads, head_dim]
    scale : float or array, or None
        Given ones: of one element, or one a group.
    made : array [groups], float32, or None
        Takes the scales where none are given.
    groups : int
        Of as many heads each.
    rotate : bool
        Rows are multiplied by a Hadamard matrix first; ``head_dim`` is 64, 128 or 256.
    stream : int, stream or None
    """
    device = device_for(x)
    tokens, heads, head_dim = x.shape
    in_type = scalar_type(x.dtype)
    assert in_type is not None
    if not tokens or not heads:
        if made is not None:
            made.fill(1)
        return
    group_heads = heads // groups
    arch = native_arch(device.info.capability)
    largest, convert = make_quantize_plans(arch, in_type, out_type, tokens * group_heads, groups)
    given = stream_handle(stream)
    queue = device.current_stream() if given is None else given
    at = device.pointer
    in_memory = scale is not None and not isinstance(scale, float)
    stride = scale.strides[0] if in_memory and scale.size > 1 else 0

    def packed(partial: int) -> bytes:
        return QUANTIZE_PARAMS.pack(
            at(x), at(out),
            at(scale) if in_memory else 0,
            0 if made is None else at(made),
            partial,
            *x.strides[:2], *out.strides[:2], stride,
            tokens, group_heads, head_dim, largest.grid[0],
            _vectorised(x, out, in_type, at(x), at(out)),
            head_dim // _LANES if rotate else 0,
            scale if isinstance(scale, float) else 1.0,
            head_dim**-0.5, 0,
        )  # fmt: skip

    used = (x, out, scale if in_memory else None, made)
    if scale is not None:
        launch(device, convert, KernelArgs((packed(0),), used), queue)
        return
    with scratch_of(device, queue) as scratch:
        block = scratch.reserve(largest.workspace_bytes)
        args = KernelArgs((packed(at(block)),), (*used, block))
        launch(device, largest, args, queue)
        launch(device, convert, args, queue)


def _vectorised(x: Any, out: Any, in_type: ScalarType, at_x: int, at_out: int) -> bool:
    count = _WIDE // in_type.itemsize
    reads = at_x | x.strides[0] | x.strides[1]
    writes = at_out | out.strides[0] | out.strides[1]
    return not (x.shape[2] % count or reads % _WIDE or writes % count)
