"""The launches of one call, recorded without a GPU, for a host without Python to repeat.

It is made twice, with arrays that lie elsewhere: what differs in the parameters are addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import flash_attn_varlen_func
from cupyflash.runtime.device import DeviceInfo, use_device
from cupyflash.runtime.dry_device import DryDevice, encoded_map, reach, reserved
from cupyflash.runtime.plan import Plan
from cupyflash.runtime.workspace import free_workspaces

__all__ = ["Address", "Launch", "RecordedCall", "Struct", "TensorMap", "record"]


@dataclass(frozen=True)
class Address:
    """Where a struct holds an address: byte ``offset``; of which array, and how far into it."""

    offset: int
    array: str
    plus: int


@dataclass(frozen=True)
class Struct:
    """A parameter passed by value; its addresses are 0 here."""

    image: bytes
    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class TensorMap:
    """Arguments of ``cuTensorMapEncodeTiled``; interleave 0 and element strides 1."""

    array: str
    plus: int
    element_type: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int
    oob_fill: int


@dataclass(frozen=True)
class Launch:
    """One launch; parameters in order."""

    plan: Plan
    params: tuple[Struct | TensorMap, ...]


@dataclass(frozen=True)
class RecordedCall:
    """Launches, and the arrays that they read and write.

    Attributes
    ----------
    info : DeviceInfo
    launches : tuple of Launch
    arrays : dict of str to array
        The call's by their names; ``workspace`` (scratch, anything in it) and ``counters`` (0 at
        first, and 0 again after each launch) where the launches need them. None of their memory
        was touched.
    """

    info: DeviceInfo
    launches: tuple[Launch, ...]
    arrays: dict[str, Any]


def record(info: DeviceInfo, arguments: Mapping[str, Any]) -> RecordedCall:
    """What `flash_attn_varlen_func` launches for the arguments, NumPy arrays, on a device.

    They are right for every batch within the bounds of these arguments: lengths, tables and the
    content of the arrays may be others.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        What the call itself would raise on the device.
    """
    one, two = (_recorded(info, arguments) for _ in range(2))
    launches = []
    for (plan, values), (_, others) in zip(one.launches, two.launches, strict=True):
        params = (_param(*pair, one, two) for pair in zip(values, others, strict=True))
        launches.append(Launch(plan, tuple(params)))
    names = {
        address.array
        for launch in launches
        for param in launch.params
        for address in (param.addresses if isinstance(param, Struct) else (param,))
    }
    arrays = {name: array for name, array in one.arrays.items() if name in names}
    return RecordedCall(info, tuple(launches), arrays)


def _recorded(info: DeviceInfo, arguments: Mapping[str, Any]) -> DryDevice:
    """A call with arrays of its own, which lie to each other as the given ones do."""
    roots: dict[int, Any] = {}
    given = {
        name: _elsewhere(value, roots)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    device = DryDevice(info, dict(given))
    with use_device(device):
        flash_attn_varlen_func(**{**arguments, **given})
    free_workspaces()
    return device


def _elsewhere(array: Any, roots: dict[int, Any]) -> Any:
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    offset = array.ctypes.data - root.ctypes.data
    memory = roots.setdefault(
        id(root), reserved((max(reach(root), offset + reach(array)),), np.uint8)
    )
    return np.ndarray(array.shape, array.dtype, memory, offset, array.strides)


def _param(value: bytes, other: bytes, one: DryDevice, two: DryDevice) -> Struct | TensorMap:
    found = encoded_map(value)
    if found is not None:
        element_type, pointer, *numbers = found
        return TensorMap(*one.place(pointer), element_type, *numbers)
    words, others = (np.frombuffer(v[: len(v) // 8 * 8], np.uint64) for v in (value, other))
    image, addresses = bytearray(value), []
    for i in np.flatnonzero(words != others).tolist():
        place = one.place(int(words[i]))
        if place != two.place(int(others[i])):
            raise AssertionError(f"bytes {8 * i} of a parameter are no address")
        addresses.append(Address(8 * i, *place))
        image[8 * i : 8 * i + 8] = bytes(8)
    return Struct(bytes(image), tuple(addresses))
