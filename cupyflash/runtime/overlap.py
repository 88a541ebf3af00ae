"""Whether a kernel may write one array while it reads another."""

from __future__ import annotations

from typing import Any

import numpy as np

from .device import Device

__all__ = ["check_in_place"]


def check_in_place(device: Device, output: Any, name: str, inputs: dict[str, Any]) -> None:
    """Allow an output that is an input, element for element, and refuse every other overlap.

    Raises
    ------
    ValueError
        They share memory in another way: elements would be overwritten before they are read.
    """
    start = device.pointer(output)
    for other_name, other in inputs.items():
        begin = device.pointer(other)
        same = begin == start and other.strides == output.strides
        if (same and other.itemsize == output.itemsize) or not _ranges_meet(
            start, output, begin, other
        ):
            continue
        if np.shares_memory(_shadow(start, output), _shadow(begin, other)):
            raise ValueError(
                f"{name} overlaps {other_name} but is not the same array; use that array itself, "
                "or memory of its own"
            )


def _ranges_meet(start: int, array: Any, other_start: int, other: Any) -> bool:
    low, high = _extent(start, array)
    other_low, other_high = _extent(other_start, other)
    return low < other_high and other_low < high


def _extent(start: int, array: Any) -> tuple[int, int]:
    if not array.size:
        return start, start
    low = high = start
    for count, stride in zip(array.shape, array.strides, strict=True):
        reach = (count - 1) * stride
        low, high = (low, high + reach) if reach >= 0 else (low + reach, high)
    return low, high + int(array.itemsize)


def _shadow(start: int, array: Any) -> Any:
    """An array of the same addresses for NumPy to reason about; it is never read."""

    class Shadow:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "data": (start, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
        }

    return np.asarray(Shadow())
