"""What a call looks at before its launch, as one key: quick to make for arrays on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

from .cupy_import import load_cupy
from .device import Device

__all__ = ["Known", "gpu_key", "one_gpu"]

T = TypeVar("T")

# A property of CuPy's arrays takes as long as a few lines of Python, `strides` the longest.
_dense = attrgetter("shape", "dtype")
_strided = attrgetter("shape", "dtype", "strides")


def gpu_key(given: Sequence[Any], options: Any) -> Any:
    """Equal for calls that are validated alike; None where arrays must be looked at first.

    It holds all that validating looks at, of arrays that are CuPy's: no others have
    ``_c_contiguous``, which stands for the strides.

    Parameters
    ----------
    given : sequence
        Arrays, floats in place of arrays, or None.
    options : hashable
    """
    try:
        seen = [
            a if a is None or type(a) is float
            else _dense(a) if a._c_contiguous else _strided(a)
            for a in given
        ]  # fmt: skip
        if not one_gpu():
            seen += [a if a is None or type(a) is float else a.data.device_id for a in given]
    except AttributeError:
        return None
    return tuple(seen), options


@cache
def one_gpu() -> bool:
    """Whether all arrays are on the same one, so that an address says which."""
    runtime = load_cupy().cuda.runtime
    try:
        return bool(runtime.getDeviceCount() == 1)
    except runtime.CUDARuntimeError:
        return False


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
