"""The launches of earlier calls, found by what those looked at and where their arrays were."""

from __future__ import annotations

from typing import Any

from .fa_version import version_in_block
from .runtime import env
from .runtime.device import Device, active_device
from .runtime.gpu_key import gpu_key
from .runtime.recording import Recording
from .runtime.workspace import scratch_of

__all__ = ["call_key", "keep_launches", "queue_kept"]

_MOST_PLACES = 8192

_recordings: dict[Any, Recording] = {}


def call_key(given: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """Equal for calls that are validated and planned alike; None where arrays must be looked at."""
    active = active_device()
    side = None if active is None else active.info
    return gpu_key(given, (options, side, version_in_block(), env.of_calls()))


def queue_kept(place: Any, device: Device, stream: int) -> bool:
    """Queue what was kept for a place, unless there is nothing or its scratch memory has moved.

    Parameters
    ----------
    place : hashable
        All that the launches depend on: what decides about them, and addresses.
    device : Device
    stream : int
    """
    recording = _recordings.get(place)
    if recording is None:
        return False
    if not recording.places:
        return recording.queue()
    scratch = scratch_of(device, stream)
    with scratch.lock:
        return scratch.still_serves(recording) and recording.queue()


def keep_launches(place: Any, recording: Recording) -> None:
    """Keep what a call queued, unless its scratch memory moved meanwhile."""
    if len(recording.places) < 2:
        if len(_recordings) >= _MOST_PLACES:
            _recordings.clear()
        _recordings[place] = recording
