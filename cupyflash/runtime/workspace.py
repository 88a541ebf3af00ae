"""Device scratch memory that calls share: one block a device and stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from .arrays import on_stream
from .device import Device
from .errors import CaptureError
from .recording import Recording, current_recording

__all__ = ["COUNTERS", "MAILBOX", "Scratch", "free_workspaces", "scratch_of", "with_memory"]

_GRAIN = 1 << 20
_PER_THREAD_STREAM = 2

COUNTERS = 4096
"""uint32 words of `Scratch.counters` that blocks count in."""

MAILBOX = 1 << 20
"""uint32 words behind them, where blocks leave each other what is not 0."""


class Scratch:
    """The scratch memory of one stream. Hold it while queueing the launches of one call::

        with scratch_of(device, stream) as scratch:
            block = scratch.reserve(plan.workspace_bytes)

    Calls on a stream run one after the other, so they share a block. A block that a capture has
    seen belongs to a graph from then on and is kept until `free_workspaces`.
    """

    def __init__(self, device: Device, stream: int | None) -> None:
        self._device, self._stream = device, stream
        self.lock = threading.RLock()
        self._place: tuple[int, int] | None = None  # of the block and the counters, once asked
        self._block: Any = None
        self._counters: Any = None
        self._nbytes = 0
        self._captured = False
        self._pinned: list[Any] = []

    def __enter__(self) -> Scratch:
        self.lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.lock.release()

    @property
    def nbytes(self) -> int:
        """Bytes held, pinned blocks included."""
        held = [*self._pinned, *([] if self._block is None else [self._block])]
        return sum(int(block.nbytes) for block in held)

    def reserve(self, nbytes: int) -> Any:
        """A uint8 array of at least ``nbytes`` bytes, its content undefined.

        Raises
        ------
        CaptureError
            There is no such block yet, and the stream is being captured.
        """
        capturing = self._device.is_capturing(self._stream)
        if nbytes > self._nbytes:
            if capturing:
                raise CaptureError(
                    f"{nbytes} bytes of workspace are needed ({self._nbytes} there) and would be "
                    "allocated"
                )
            self._grow(nbytes)
        self._captured |= capturing
        recording = current_recording()
        if recording is not None and self._block is not None:
            pointer = self._device.pointer
            self._place = self._place or (pointer(self._block), pointer(self._counters))
            recording.reserved(nbytes, self._place)
        return self._block

    def still_serves(self, recording: Recording) -> bool:
        """Whether the memory that a call reserved is still there, which reserves it again."""
        if recording.nbytes > self._nbytes or self._place not in recording.places:
            return False
        self._captured |= self._device.is_capturing(self._stream)
        return True

    @property
    def counters(self) -> Any:
        """uint32 [COUNTERS + MAILBOX], which every launch finds 0 and leaves 0. There once a block
        is."""
        return self._counters

    def _grow(self, nbytes: int) -> None:
        if self._counters is None:
            words = (COUNTERS + MAILBOX,)
            counters = self._device.empty(words, np.dtype(np.uint32), self._stream)
            with on_stream(counters, self._stream):
                counters.fill(0)
            self._counters = counters
        if self._captured:
            self._pinned.append(self._block)
        size = max(-(-nbytes // _GRAIN) * _GRAIN, min(2 * self._nbytes, 1 << 28))
        self._block, self._nbytes, self._place = None, 0, None
        self._block = self._device.empty((size,), np.dtype(np.uint8), self._stream)
        self._nbytes, self._captured = size, False


_scratch: dict[tuple[Any, ...], Scratch] = {}
_making = threading.Lock()


def scratch_of(device: Device, stream: int | None) -> Scratch:
    """The scratch memory of a stream; None is the current one."""
    handle = device.current_stream() if stream is None else stream
    key: tuple[Any, ...] = (device, handle)
    if handle == _PER_THREAD_STREAM:
        key = (device, handle, threading.get_ident())
    found = _scratch.get(key)
    if found is None:
        with _making:
            found = _scratch.setdefault(key, Scratch(device, handle))
    return found


def with_memory(
    device: Device,
    stream: int,
    workspace: Any,
    nbytes: int,
    queue: Callable[[Any, Any], None],
    counts: bool = False,
) -> None:
    """Let a call queue its launches with the memory they need.

    Parameters
    ----------
    device : Device
    stream : int
    workspace : array [bytes], uint8, or None
        The caller's; the stream's own if None.
    nbytes : int
        What the launches need.
    queue : callable
        Called once, with the memory (None where none is needed) and the stream's
        `Scratch.counters`. These are None where the memory is the caller's, which may hold
        anything: the launches then have counters in it, and clear them.
    counts : bool
        The launches use the stream's counters whosoever's the memory is.
    """
    if counts or (nbytes and workspace is None):
        with scratch_of(device, stream) as scratch:
            block = scratch.reserve(nbytes if workspace is None else 1)
            queue(block if workspace is None else workspace, scratch.counters)
    else:
        queue(workspace if nbytes else None, None)


def free_workspaces() -> int:
    """Give all scratch memory back to CuPy's pool.

    Graphs that were captured with it must not be launched afterwards.

    Returns
    -------
    int
        The bytes given back.
    """
    with _making:
        held = list(_scratch.values())
        _scratch.clear()
    return sum(scratch.nbytes for scratch in held)
