"""Queueing a planned launch, and preparing launches that a capture will see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .compile import load_kernel
from .device import Device
from .params import KernelArgs
from .plan import Plan
from .recording import current_recording
from .workspace import scratch_of

__all__ = ["launch", "prepare", "stream_handle"]


def launch(device: Device, plan: Plan, args: KernelArgs, stream: int | None) -> None:
    """Queue one launch; an empty grid is none.

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    if 0 not in plan.grid:
        kernel = device.kernels.get(plan.variant) or load_kernel(plan.variant, device, stream)
        recording = current_recording()
        if recording is None:
            device.launch(kernel, plan, args, stream)
            return
        again = device.ready(kernel, plan, args, stream)  # type: ignore[attr-defined]
        if again():
            device.launch(kernel, plan, args, stream)
        recording.launches.append(again)


def prepare(device: Device, plans: Iterable[Plan], stream: int | None = None) -> None:
    """Compile, load and allocate for plans, so that their launches can be captured on ``stream``.

    Raises
    ------
    CaptureError, CompileError
    """
    nbytes = 0
    for plan in plans:
        load_kernel(plan.variant, device, stream)
        nbytes = max(nbytes, plan.workspace_bytes)
    if nbytes:
        with scratch_of(device, stream) as scratch:
            scratch.reserve(nbytes)


def stream_handle(stream: Any) -> int | None:
    """The raw handle of what a caller passed as ``stream=``; None stays the current stream.

    Raises
    ------
    TypeError
        It is not a handle, and has neither ``ptr`` nor ``__cuda_stream__``.
    """
    if stream is None or isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if hasattr(stream, "ptr"):
        return int(stream.ptr)
    raise TypeError(
        f"stream is {type(stream).__name__}; pass a CuPy stream, an object with __cuda_stream__, "
        "or a raw handle as an int"
    )
