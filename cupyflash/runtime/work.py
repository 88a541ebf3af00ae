"""A call on its way to a stream: what its launches read, write and work in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .arrays import place
from .attention_args import Tiling, arrays_of, pack_attention, results
from .call import Call
from .device import Device
from .launch import launch
from .params import KernelArgs
from .placement import check_placement
from .plan import Plan
from .workspace import with_memory

__all__ = ["NO_TILING", "Work", "queue_work", "usable_bytes"]

NO_TILING = Tiling(0, 0, 0, 0)
"""Of kernels whose plan lies in a struct of their own."""

_UINT8 = np.dtype(np.uint8)


class Work(NamedTuple):
    """One call and the memory of its launches.

    Attributes
    ----------
    call : Call
    device : Device
    out, lse : array
        Where to write; ``lse`` may be None.
    block : array, uint8, or None
        Scratch; None where none is needed.
    counters : array, uint32, or None
        0 between launches. None where the block is the caller's, which may hold anything: counters
        then lie in it and are set to 0 first.
    stream : int
    """

    call: Call
    device: Device
    out: Any
    lse: Any
    block: Any
    counters: Any
    stream: int

    def pack(self, tiling: Tiling = NO_TILING, scratch: Any = None) -> bytes:
        """The `AttentionParams`; see `attention_args.pack_attention`."""
        return pack_attention(self.call, self.device, self.out, self.lse, scratch, tiling)

    def touched(self, *more: Any) -> tuple[Any, ...]:
        """The arrays of the call, its results, and more that its launches may touch."""
        return arrays_of(self.call, self.out, self.lse, *more)

    def launch(self, plan: Plan, values: tuple[bytes, ...], arrays: tuple[Any, ...]) -> None:
        """Queue one launch with these structs; it touches these arrays and nothing else.

        Raises
        ------
        CaptureError, CompileError
            As `compile.load_kernel`.
        """
        launch(self.device, plan, KernelArgs(values, arrays), self.stream)


def queue_work(
    call: Call,
    device: Device,
    stream: int,
    workspace: Any,
    nbytes: int,
    queue: Callable[[Work], None],
    *,
    found: tuple[Any, Any] | None = None,
    counts: bool = False,
) -> tuple[Any, Any]:
    """Let a call queue its launches, with results and memory.

    Parameters
    ----------
    call : Call
    device : Device
    stream : int
    workspace : array [bytes], uint8, or None
        The caller's; the stream's own if None.
    nbytes : int
        What the launches need.
    queue : callable
        Called once.
    found : tuple, optional
        ``out`` and ``lse`` of another launch that serves part of the requests.
    counts : bool
        The launches use the stream's counters whosoever's the workspace is.

    Returns
    -------
    out : array [total_q, num_heads_q, head_dim_v]
    lse : array [num_heads_q, total_q], float32, or None

    Raises
    ------
    ValueError
        As `check_placement`.
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    if found is None:
        check_placement(call, device)
        found = results(call, device, stream)
    out, lse = found

    def with_block(block: Any, counters: Any) -> None:
        queue(Work(call, device, out, lse, block, counters, stream))

    with_memory(device, stream, workspace, nbytes, with_block, counts)
    return out, lse


def usable_bytes(call: Call, device: Device, workspace: Any) -> int | None:
    """Bytes of the caller's workspace; None without one.

    Raises
    ------
    ValueError
        The workspace is not bytes, or not aligned.
    """
    if workspace is None:
        return None
    place(("q", "workspace"), (call.arrays.q, workspace))
    contiguous = workspace.strides == (1,) or workspace.size < 2
    if workspace.dtype != _UINT8 or workspace.ndim != 1 or not contiguous:
        raise ValueError(
            f"workspace is {workspace.dtype} {workspace.shape}; it must be contiguous uint8 "
            "[nbytes]"
        )
    if device.pointer(workspace) % 16:
        raise ValueError("workspace must start at a multiple of 16 bytes")
    return int(workspace.nbytes)
