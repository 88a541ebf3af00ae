"""Whether a kernel may write one array while it reads another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Footprint", "check_in_place", "footprint", "share_memory"]

Spec = tuple[tuple[int, ...], Any, tuple[int, ...]]


class Footprint(NamedTuple):
    """Where the elements of an array lie, from its first one on."""

    low: int
    high: int
    spec: Spec


def footprint(spec: Spec) -> Footprint:
    """The bytes from the lowest to past the highest element."""
    shape, dtype, strides = spec
    if 0 in shape:
        return Footprint(0, 0, spec)
    reach = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    low = sum(r for r in reach if r < 0)
    return Footprint(low, sum(r for r in reach if r > 0) + int(dtype.itemsize), spec)


def check_in_place(
    names: tuple[str, str], start: int, output: Footprint, other_start: int, other: Footprint
) -> None:
    """Allow an output that is an input, element for element, and refuse every other overlap.

    Raises
    ------
    ValueError
        They share memory in another way: elements would be overwritten before they are read.
    """
    same = output.spec[1].itemsize == other.spec[1].itemsize and output.spec[2] == other.spec[2]
    if start == other_start and same:
        return
    if share_memory(start, output, other_start, other):
        raise ValueError(
            f"{names[0]} overlaps {names[1]} but is not the same array; use that array itself, or "
            "memory of its own"
        )


def share_memory(start: int, one: Footprint, other_start: int, other: Footprint) -> bool:
    """Whether an element of one lies where an element of the other does."""
    if start + one.low >= other_start + other.high or other_start + other.low >= start + one.high:
        return False
    return bool(np.shares_memory(_shadow(start, one.spec), _shadow(other_start, other.spec)))


def _shadow(start: int, spec: Spec) -> Any:
    """An array of the same addresses for NumPy to reason about; it is never read."""
    shape, dtype, strides = spec

    class Shadow:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "data": (start, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{dtype.itemsize}",
        }

    return np.asarray(Shadow())
