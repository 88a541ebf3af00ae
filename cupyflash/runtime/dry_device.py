"""A device without a GPU that writes launches down, and arrays without memory to call it with."""

from __future__ import annotations

import hashlib
import mmap
import sys
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from .device import DeviceInfo
from .params import KernelArgs
from .plan import Plan
from .variant import Variant

__all__ = ["DryDevice", "encoded_map", "reach", "reserved"]

_MADE = {"uint8": "workspace", "uint32": "counters", "float32": "lse"}  # what calls allocate
# Python has the name from 3.13 on; without it Linux refuses more than the machine has.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_maps: dict[bytes, tuple[Any, ...]] = {}  # by what stands for them; a layout may keep that


@dataclass(eq=False)
class DryDevice:
    """Implements `device.Device`: arrays are NumPy's, and nothing is compiled.

    Attributes
    ----------
    arrays : dict of str to array
        The caller's, and what its calls allocate.
    kernels : dict of Variant to Variant
        What would be compiled.
    launches : list of (Plan, tuple of bytes)
        Plans, and their parameters.
    """

    info: DeviceInfo
    arrays: dict[str, Any] = field(default_factory=dict)
    kernels: dict[Variant, Variant] = field(default_factory=dict)
    launches: list[tuple[Plan, tuple[bytes, ...]]] = field(default_factory=list)

    def compile(self, variant: Variant) -> Variant:
        return self.kernels.setdefault(variant, variant)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int | None) -> Any:
        array = reserved(shape, dtype)
        made = name = _MADE.get(array.dtype.name, "out")
        while name in self.arrays:  # scratch memory that grew, or beside the caller's workspace
            name = f"{made}_{len(self.arrays)}"
        self.arrays[name] = array
        return array

    def pointer(self, array: Any) -> int:
        return int(array.ctypes.data)

    def is_capturing(self, stream: int | None) -> bool:
        return False

    def beside(self, stream: int) -> int:
        return stream

    def order(self, first: int, then: int) -> None:
        """Nothing is queued."""

    def current_stream(self) -> int:
        return 0

    def encode_tensor_map(self, array: Any, *numbers: Any) -> bytes:
        token = hashlib.blake2b(repr(numbers).encode()).digest() * 2
        _maps[token] = numbers
        return token

    def launch(self, kernel: Variant, plan: Plan, args: KernelArgs, stream: int | None) -> None:
        self.launches.append((plan, tuple(args.values)))

    def place(self, pointer: int) -> tuple[str, int]:
        """The array that an address lies in, and how far into it."""
        for name, array in self.arrays.items():
            start = int(array.ctypes.data)
            if start <= pointer < start + max(1, reach(array)):
                return name, pointer - start
        raise AssertionError(f"{pointer:#x} is in none of {', '.join(self.arrays)}")


def encoded_map(value: bytes) -> tuple[Any, ...] | None:
    """What `DryDevice.encode_tensor_map` was given for a map; None if it is none of those."""
    return _maps.get(value)


def reach(array: Any) -> int:
    """Bytes from the first element to behind the last."""
    if 0 in array.shape:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return int(sum((n - 1) * step for n, step in steps)) + int(array.itemsize)


def reserved(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array from the start of a page on, without memory behind it until it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    memory = np.frombuffer(mmap.mmap(-1, max(1, nbytes), flags=flags), np.uint8)
    return memory[:nbytes].view(dtype).reshape(shape)
