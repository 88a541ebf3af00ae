"""Launches beside those of a stream, so that what a step needs later is made meanwhile."""

from __future__ import annotations

from typing import Any

from .runtime.arrays import place
from .runtime.device import device_for
from .runtime.launch import stream_handle

__all__ = ["SideStream"]


class SideStream:
    """A stream that starts behind what is queued so far on another, and then runs beside it.

    What finds and deals shared prefixes reads block tables and lengths, not keys: it can run beside
    the launches in front of a step's first attention. Captured into a graph, it is a branch of it::

        side = SideStream(seqused_k)
        tree = find_prefix_tree(block_table, seqused_k, 16, out=buffer, stream=side)
        schedule = get_prefix_schedule(..., prefix_tree=tree, out=memory, stream=side)
        ...  # norms and projections of the first layer
        side.join()
        reshape_and_cache_flash(...)
        cascade_attention(..., prefix_tree=tree, prefix_scheduler_metadata=schedule)

    A launch behind a wait cannot start early, so `join` belongs in front of a launch that is short
    or would not start early anyway. The first `cascade_attention` with a schedule that was made
    here joins by itself if nothing did.

    Parameters
    ----------
    beside : array
        Says the device. On the CPU there is nothing to run beside: this is the stream itself.
    stream : int or stream, optional
        The current stream of the array's device if None.

    Attributes
    ----------
    ptr : int or None
        The raw handle, for ``stream=``; None on the CPU.

    Raises
    ------
    TypeError
        As `flash_attn_varlen_func`, of a stream that is none.
    """

    def __init__(self, beside: Any, stream: Any = None) -> None:
        (array,), on_host = place(("beside",), (beside,), stream)
        self.ptr: int | None = None
        self._device = None if on_host else device_for(array)
        self._joined: set[int] = set()
        if self._device is not None:
            self._main = self._handle(stream)
            self.ptr = self._device.beside(self._main)
            self._device.order(self._main, self.ptr)

    def join(self, stream: Any = None) -> None:
        """Let what is queued from here on wait for what is queued on this stream so far.

        Parameters
        ----------
        stream : int or stream, optional
            What is to wait; the stream that this one runs beside if None.
        """
        if self._device is not None and self.ptr is not None:
            main = self._main if stream is None else self._handle(stream)
            self._device.order(self.ptr, main)
            self._joined.add(main)

    def queued(self) -> None:
        """What was joined before is not enough: more is queued here since."""
        self._joined.clear()

    def join_once(self, stream: int) -> None:
        """`join` unless it was done."""
        if stream not in self._joined:
            self.join(stream)

    def _handle(self, stream: Any) -> int:
        given = stream_handle(stream)
        assert self._device is not None
        return self._device.current_stream() if given is None else given
