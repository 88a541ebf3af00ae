"""Calls of `cascade_attention` that are one launch, queued again as an earlier one was.

A call is known by one key of all that decides about it except addresses, and what it queued by its
addresses too. One that is not known, or lies elsewhere, is validated and planned.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from .kept_launches import call_key, keep_launches, queue_kept
from .prefix_tree import PrefixTree
from .runtime import env
from .runtime.device import active_device, device_for
from .runtime.launch import stream_handle
from .runtime.recording import recorded
from .shared_prefix import PrefixSchedule

__all__ = ["find_known"]

_MOST_CALLS = 1024
_QUERY, _WINDOW = 1, 3  # of the arrays, of the options


class _Like:
    """What calls with one key share."""

    __slots__ = ("device", "needs", "pick", "types")

    def __init__(self, given: tuple[Any, ...], options: tuple[Any, ...], needs: Any) -> None:
        self.device = None if active_device() else device_for(given[_QUERY])
        self.types, self.needs = _types(options), needs  # those of a schedule
        self.pick = itemgetter(
            *(i for i, a in enumerate(given) if a is not None and type(a) is not float)
        )


_known: dict[Any, _Like] = {}


class KnownCascade:
    """A call whose arrays need no closer look: to be queued again, or for the first time."""

    __slots__ = ("_given", "_key", "_like", "_options", "_schedule", "_stream")

    def __init__(self, key: Any, given: Any, options: Any, schedule: Any, stream: Any) -> None:
        self._key, self._like = key, _known.get(key)
        self._given, self._options, self._schedule = given, options, schedule
        self._stream = stream

    def queue(self) -> bool:
        """Queue it as it was queued before, if it was.

        Raises
        ------
        TypeError
            Of a stream that is none.
        """
        like, schedule = self._like, self._schedule
        # Equal options may be of other types, some of which are refused.
        if like is None or like.types != _types(self._options):
            return False
        if schedule is not None and schedule.needs != like.needs:
            return False
        device: Any = like.device or active_device()
        place, stream = self._place(like, device)
        if schedule is not None and schedule.side is not None:
            schedule.side.join_once(stream)
        return queue_kept(place, device, stream)

    def keep(self, attend: Callable[..., bool], *call: Any) -> None:
        """Let a call be validated and queued, and keep what it queued if it is one launch."""
        device: Any = active_device() or device_for(self._given[_QUERY])
        if env.check() or env.debug() or not hasattr(device, "ready"):
            attend(*call)
            return
        one: list[bool] = []
        recording = recorded(lambda: one.append(attend(*call)))
        if not one[0]:
            return
        like = self._like
        if like is None:
            if len(_known) >= _MOST_CALLS:
                _known.clear()
            needs = getattr(self._schedule, "needs", None)
            like = _known[self._key] = _Like(self._given, self._options, needs)
        keep_launches(self._place(like, device)[0], recording)

    def _place(self, like: _Like, device: Any) -> tuple[Any, int]:
        given = stream_handle(self._stream)
        stream = int(device.current_stream() if given is None else given)
        return (like, device, stream, *map(device.pointer, like.pick(self._given))), stream


def find_known(
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    tree: PrefixTree | None,
    schedule: PrefixSchedule | None,
    stream: Any,
) -> KnownCascade | None:
    """A call by its key; None where its arrays must be looked at.

    Parameters
    ----------
    given : CascadeArrays
    options : CascadeOptions
    tree, schedule, stream
        As `cascade_attention` takes them.
    """
    sizes, query = None, given[_QUERY]
    if query is None or type(query) is float:  # these have a key, as descales may be them
        return None
    if tree is not None:
        if type(tree) is not PrefixTree:
            return None
        sizes = tree.batch, tree.levels
    buffers = None if tree is None else tree.buffer, None if schedule is None else schedule.buffer
    given, options = (*given, *buffers), (*options, sizes)
    key = call_key(given, options)
    try:
        return None if key is None else KnownCascade(key, given, options, schedule, stream)
    except TypeError:  # an option that is refused has no hash
        return None


def _types(options: tuple[Any, ...]) -> list[type]:
    window = options[_WINDOW] or ()
    return [*map(type, options), *map(type, window)]
