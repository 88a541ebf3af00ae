"""Where the arrays of a call lie: elements aligned, results in memory of their own."""

from __future__ import annotations

from typing import Any

from .arrays import AttentionArrays, address_of
from .call import Call
from .device import Device
from .layout import Layout
from .overlap import footprint, share_memory

__all__ = ["check_apart", "check_placement"]

_NAMES = (*AttentionArrays._fields, "q_descale", "k_descale", "v_descale")
_Q, _OUT, _LSE = (_NAMES.index(name) for name in ("q", "out", "lse"))


def check_placement(call: Call, device: Device | None = None) -> None:
    """Refuse what kernels could not address, and results that would change what is read.

    ``out`` may be q itself: rows are read before they are written.

    Parameters
    ----------
    call : Call
    device : Device, optional
        None where NumPy computes, which takes elements at any address.

    Raises
    ------
    ValueError
        What lies where, and what would work.
    """
    layout = call.layout
    reach: _Reach = layout.kept.get(_Reach) or layout.keep(_Reach, lambda: _Reach(layout))
    given = (*call.arrays, *call.descales)
    pointer = address_of if device is None else device.pointer
    starts = {i: pointer(given[i]) for i in reach.there}
    if device is not None:
        reach.check_aligned(starts)
    for result in reach.results:
        reach.check_apart(result, starts)


def check_apart(names: tuple[str, str], one: Any, other: Any) -> None:
    """Refuse two results that share memory.

    Raises
    ------
    ValueError
    """
    starts = [address_of(a) for a in (one, other)]
    prints = [footprint((a.shape, a.dtype, a.strides)) for a in (one, other)]
    if share_memory(starts[0], prints[0], starts[1], prints[1]):
        raise ValueError(f"{names[0]} overlaps {names[1]}: results need memory of their own")


class _Reach:
    """The bytes that the arrays of a layout take, from their first elements on."""

    def __init__(self, layout: Layout) -> None:
        specs = (*layout.specs, *layout.scales)
        prints = {i: footprint(s) for i, s in enumerate(specs) if type(s) is tuple}
        self._prints = {i: p for i, p in prints.items() if p.low < p.high}
        self.there = tuple(self._prints)
        self.results = tuple(i for i in (_OUT, _LSE) if i in self._prints)
        self._sizes = {i: p.spec[1].itemsize for i, p in self._prints.items()}
        self._odd = {i: _odd_strides(p.spec) for i, p in self._prints.items()}

    def check_aligned(self, starts: dict[int, int]) -> None:
        """Elements lie at multiples of their size."""
        for i, size in self._sizes.items():
            if (starts[i] | self._odd[i]) % size:
                strides, dtype = self._prints[i].spec[2], self._prints[i].spec[1]
                raise ValueError(
                    f"{_NAMES[i]} starts {starts[i] % size} bytes past a multiple of {size}, its "
                    f"strides are {strides}: every {dtype} must lie at a multiple of {size} bytes; "
                    "pass a copy"
                )

    def check_apart(self, result: int, starts: dict[int, int]) -> None:
        """No element of a result lies in another array; of ``out``, in another than q."""
        start, own = starts[result], self._prints[result]
        begin, end = start + own.low, start + own.high
        for i, other in self._prints.items():
            at = starts[i]
            if i == result or at + other.low >= end or at + other.high <= begin:
                continue
            in_place = at == start and own.spec[1:] == other.spec[1:]
            if in_place and result == _OUT and i == _Q:
                continue
            if share_memory(start, own, at, other):
                raise ValueError(
                    f"{_NAMES[result]} overlaps {_NAMES[i]}: results need memory of their own "
                    "(out may be q itself)"
                )


def _odd_strides(spec: tuple[Any, ...]) -> int:
    shape, _, strides = spec
    bits = 0
    for count, stride in zip(shape, strides, strict=True):
        bits |= stride if count > 1 else 0
    return bits
