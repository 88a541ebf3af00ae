"""Calls like an earlier one: found by one key, and queued again without validating and planning.

The key of a call holds all that decides about it except addresses, and what was queued for it is
kept by its addresses too. A call whose key is new is validated as any first one; one whose
addresses are new is planned from what its key has kept.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np

from .families import FAMILIES
from .kept_launches import call_key, keep_launches, queue_kept
from .runtime.arrays import AttentionArrays
from .runtime.call import Call
from .runtime.device import Device, active_device, device_for
from .runtime.launch import stream_handle
from .runtime.recording import recorded
from .scheduler_metadata import SchedulerMetadata

__all__ = ["keep_known", "queue_known"]

_MOST_CALLS = 1024
_ARRAYS = len(AttentionArrays._fields)
_OUT, _LSE = (AttentionArrays._fields.index(name) for name in ("out", "lse"))
_WINDOW = 4  # of the options
_FLOAT32 = np.dtype(np.float32)
_make = tuple.__new__  # as a NamedTuple's own, in a third of the time


class _Known:
    """What calls with one key share."""

    __slots__ = ("bounds", "device", "launch", "layout", "lse_shape", "pick", "types")

    def __init__(self, call: Call, version: int, given: tuple[Any, ...], options: Any) -> None:
        self.layout, self.launch = call.layout, FAMILIES[version].launch
        self.device = None if active_device() else device_for(call.arrays.q)
        self.types = [*map(type, options)]
        self.bounds: Any = None  # of a schedule
        self.lse_shape = self.layout.lse_shape if call.problem.wants_lse else None
        there = {i for i, a in enumerate(given) if a is not None and type(a) is not float}
        there |= {_OUT, _LSE} if self.lse_shape else {_OUT}
        self.pick = itemgetter(*sorted(there))


_known: dict[Any, _Known] = {}


def queue_known(
    given: tuple[Any, ...], options: tuple[Any, ...], scheduler_metadata: Any, stream: Any
) -> tuple[Any, Any] | None:
    """Queue a call whose like is known, and return ``out`` and ``lse``; None where it is not.

    Parameters
    ----------
    given : tuple
        `AttentionArrays`, three descales and the workspace.
    options : tuple
        Max lengths, scale, causal, window, softcap, fp8 types, whether lse is returned, splits,
        batch invariance, version.
    scheduler_metadata : SchedulerMetadata or its buffer, optional
    stream : int, stream or None

    Raises
    ------
    TypeError, ValueError
        The stream, or the address of the workspace.
    CaptureError
        Memory would be allocated during a capture.
    """
    given = _with_schedule(given, scheduler_metadata)
    try:
        known = _known.get(call_key(given, options))
    except TypeError:  # an option that is refused
        return None
    # Equal options may be of other types, some of which are refused.
    if known is None or known.types != [*map(type, options)]:
        return None
    window = options[_WINDOW]
    if window is not None and not type(window[0]) is type(window[1]) is int:
        return None
    bounds = getattr(scheduler_metadata, "bounds", None)
    if bounds is not None and bounds is not known.bounds and bounds != known.bounds:
        return None
    device: Any = known.device or active_device()
    queue: Any = device.current_stream() if stream is None else stream_handle(stream)
    out, lse = given[_OUT], given[_LSE]
    if out is None or (lse is None and known.lse_shape):
        out, lse = _results(known, device, out, lse, queue)
        given = (*given[:_OUT], out, lse, *given[_LSE + 1 :])
    place = (known, device, queue, *map(device.pointer, known.pick(given)))
    if not queue_kept(place, device, queue):
        _queue(known, place, device, given, scheduler_metadata, queue)
    return out, lse


def keep_known(
    call: Call,
    version: int,
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    scheduler_metadata: Any,
) -> None:
    """Remember a call that was queued; parameters as `queue_known`'s."""
    own = (*call.arrays, *call.descales)
    if any(a is not b for a, b in zip(own, given, strict=False)):
        return
    given = _with_schedule(given, scheduler_metadata)
    key = call_key(given, options)
    try:
        hash(key)
    except TypeError:  # a scale may be an array without dimensions
        return
    if key is not None:
        if len(_known) >= _MOST_CALLS:
            _known.clear()
        known = _known[key] = _Known(call, version, given, options)
        known.bounds = getattr(scheduler_metadata, "bounds", None)


def _with_schedule(given: tuple[Any, ...], scheduler_metadata: Any) -> tuple[Any, ...]:
    if type(scheduler_metadata) is SchedulerMetadata:
        return (*given, scheduler_metadata.buffer)
    return (*given, scheduler_metadata)


def _results(
    known: _Known, device: Device, out: Any, lse: Any, stream: int | None
) -> tuple[Any, Any]:
    layout = known.layout
    if out is None:
        out = device.empty(layout.out_shape, layout.problem.out_type.numpy, stream)
    if lse is None and known.lse_shape:
        lse = device.empty(known.lse_shape, _FLOAT32, stream)
    return out, lse


def _queue(
    known: _Known,
    place: Any,
    device: Device,
    given: tuple[Any, ...],
    scheduler_metadata: Any,
    stream: int | None,
) -> None:
    arrays = _make(AttentionArrays, given[:_ARRAYS])
    descales, workspace = given[_ARRAYS : _ARRAYS + 3], given[_ARRAYS + 3]
    call = _make(Call, (known.layout.problem, arrays, descales, False, known.layout))
    if not hasattr(device, "ready"):
        known.launch(call, scheduler_metadata, workspace, stream)
        return
    keep_launches(place, recorded(known.launch, call, scheduler_metadata, workspace, stream))
