"""Arrays in awkward places: padded, offset, surrounded by values that must not be touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .requests import to_numpy

__all__ = ["LAYOUTS", "POISON_INDEX", "Placed", "place", "poison_of"]

LAYOUTS = ("NHD", "HND", "strided", "odd")
"""
NHD
    Dense, in the order of the axes.
HND
    Heads outside of tokens in memory, as a transposed view.
strided
    Every axis but the last is padded; rows stay 16-byte aligned.
odd
    Padded by single elements, and one element off: no row is aligned.
"""

POISON_INDEX = 2**31 - 1
"""What table entries hold that must not be read."""


def poison_of(dtype: Any) -> Any:
    """NaN in a float type, the NaN byte 0x7F in a byte, the largest index in an integer."""
    kind = np.dtype(dtype)
    if kind == np.uint8:
        return np.uint8(0x7F)
    return POISON_INDEX if kind.kind in "iu" else np.array(np.nan, kind)


@dataclass(frozen=True)
class Placed:
    """A view into a larger buffer that is poisoned everywhere else.

    Attributes
    ----------
    view : array
        What is passed to the call.
    buffer : array [n]
        The whole allocation, of the same array module.
    before : ndarray [n], bytes
        The bytes of the buffer as they were made.
    inside : ndarray [n], bool
        Which elements of the buffer belong to the view.
    """

    view: Any
    buffer: Any
    before: NDArray[np.uint8]
    inside: NDArray[np.bool_]

    def assert_padding_intact(self, name: str = "array") -> None:
        """Assert that nothing outside of the view was written."""
        bits = np.dtype(f"u{self.buffer.dtype.itemsize}")
        changed = (to_numpy(self.buffer).view(bits) != self.before.view(bits)) & ~self.inside
        if changed.any():
            raise AssertionError(
                f"{name}: {int(changed.sum())} elements outside of the array were written, the "
                f"first at offset {int(changed.argmax())} of its buffer"
            )


def place(values: NDArray[Any], layout: str = "NHD", *, xp: Any = np, pad: int = 0) -> Placed:
    """Copy ``values`` to a buffer of ``xp`` in a layout of ``LAYOUTS``.

    Parameters
    ----------
    values : ndarray [..., tokens, heads, dim] or fewer axes
    layout : str
    xp : module
        ``numpy`` or ``cupy``.
    pad : int
        More padding, so that two operands do not share strides.

    Returns
    -------
    Placed
    """
    order = list(range(values.ndim))
    if layout == "HND":
        order[-3], order[-2] = order[-2], order[-3]
    shape = [values.shape[axis] for axis in order]
    step = max(1, 16 // values.itemsize)
    padded, offset = list(shape), 1 if layout == "odd" else step
    if layout in ("strided", "odd"):
        padded[1:] = [n + 1 + pad for n in shape[1:]]
        padded[-1] = shape[-1] + offset * (1 + pad)
    strides = [int(np.prod(padded[axis + 1 :])) * values.itemsize for axis in range(len(shape))]
    size = offset + int(np.prod(padded)) + step
    buffer = np.full(size, poison_of(values.dtype), values.dtype)
    inside = np.zeros(size, bool)
    back = np.argsort(order)

    def view(whole: Any, itemsize: int, module: Any) -> Any:
        scaled = [stride // values.itemsize * itemsize for stride in strides]
        part = module.lib.stride_tricks.as_strided(whole[offset:], shape, scaled)
        return part.transpose(*(int(axis) for axis in back))

    if values.size:
        view(buffer, values.itemsize, np)[...] = values
        view(inside, 1, np)[...] = True
    before = buffer.view(np.uint8).copy()
    device = xp.asarray(buffer)
    return Placed(view(device, values.itemsize, xp), device, before, inside)
