"""What a call looks at before its launch, as one key: quick to make for arrays on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

from .device import Device

__all__ = ["Known", "gpu_key"]

T = TypeVar("T")

_seen = attrgetter("__class__", "data.device_id", "shape", "dtype", "strides")


def gpu_key(arrays: Sequence[Any], scales: tuple[Any, ...], options: Any) -> Any:
    """Equal for calls that are validated alike; None where arrays must be looked at first.

    It holds all that validating looks at, of arrays that are a GPU's. Those of NumPy have no
    ``data.device_id`` (or no ``data``: ValueError for some dtypes), lists and tensors neither.

    Parameters
    ----------
    arrays : sequence
        Arrays, or None.
    scales : tuple
        None, floats, or arrays.
    options : hashable
    """
    try:
        seen = tuple([None if a is None else _seen(a) for a in arrays])
        scales = tuple([s if s is None or type(s) is float else _seen(s) for s in scales])
    except (AttributeError, ValueError):
        return None
    return seen, scales, options


class Known(Generic[T]):
    """What was made for calls, by their `gpu_key` and device; starts anew when it is full."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._found: dict[Any, T] = {}

    def get(self, key: Any, device: Device) -> T | None:
        return self._found.get((key, device.info))

    def keep(self, key: Any, device: Device, found: T) -> None:
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[key, device.info] = found
