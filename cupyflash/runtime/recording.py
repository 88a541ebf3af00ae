"""The launches of a call, kept so that a like one with the same addresses is queued as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["Recording", "current_recording", "recorded"]


class Recording:
    """What a call queued: it depends on its key and on addresses, and on nothing else.

    Attributes
    ----------
    launches : list of callable
        Each queues a launch again and returns a ``CUresult``.
    nbytes : int
        Scratch memory that the call reserved; 0 for none.
    places : set of (int, int)
        Addresses of that memory and of its counters; several if it grew meanwhile.
    """

    __slots__ = ("launches", "nbytes", "places")

    def __init__(self) -> None:
        self.launches: list[Callable[[], int]] = []
        self.nbytes = 0
        self.places: set[tuple[int, int]] = set()

    def reserved(self, nbytes: int, place: tuple[int, int]) -> None:
        self.nbytes = max(self.nbytes, nbytes)
        self.places.add(place)

    def queue(self) -> bool:
        """Queue all launches again, as far as that goes; whether it went to the end."""
        for again in self.launches:  # noqa: SIM110 a generator takes longer than the loop
            if again():
                return False
        return True


_current: ContextVar[Recording | None] = ContextVar("cupyflash_recording", default=None)
current_recording: Callable[[], Recording | None] = _current.get


def recorded(queue: Callable[..., object], *arguments: Any) -> Recording:
    """Call ``queue`` with the arguments, and record what it queues."""
    recording = Recording()
    token = _current.set(recording)
    try:
        queue(*arguments)
    finally:
        _current.reset(token)
    return recording
