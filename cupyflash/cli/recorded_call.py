"""The launches of one call, recorded without a GPU, for a host without Python to repeat."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash import flash_attn_varlen_func
from cupyflash.runtime.attention_plan import ATTENTION_PARAMS
from cupyflash.runtime.decode_tile import DECODE_PARAMS
from cupyflash.runtime.device import DeviceInfo, use_device
from cupyflash.runtime.mla_plan import LATENT_PARAMS
from cupyflash.runtime.params import KernelArgs, ParamsLayout
from cupyflash.runtime.plan import Plan
from cupyflash.runtime.prefill_plan import PREFILL_PARAMS
from cupyflash.runtime.variant import Variant
from cupyflash.runtime.workspace import free_workspaces

__all__ = ["STRUCTS", "Address", "Launch", "RecordedCall", "Struct", "TensorMap", "record"]

_ATTENTION, _DECODE = ("AttentionParams", ATTENTION_PARAMS), ("DecodeParams", DECODE_PARAMS)
_PREFILL, _LATENT = ("PrefillParams", PREFILL_PARAMS), ("LatentParams", LATENT_PARAMS)

STRUCTS: dict[str, tuple[tuple[str, ParamsLayout], ...]] = {
    "attention_fwd_sm80.cu": (_ATTENTION,),
    "attention_combine.cu": (_ATTENTION,),
    "attention_decode_sm90.cu": (_ATTENTION, _DECODE),
    "schedule.cu": (_ATTENTION, _DECODE),
    "attention_fwd_sm90.cu": (_ATTENTION, _PREFILL),
    "attention_fwd_sm90_fp8.cu": (_ATTENTION, _PREFILL),
    "mla_decode_sm80.cu": (_ATTENTION, _LATENT),
    "mla_decode_sm90.cu": (_ATTENTION, _LATENT),
}
"""By source: the structs that its kernels are passed by value. Tensor maps come after them."""

_MADE = {"uint8": "workspace", "uint32": "counters", "float32": "lse"}  # what calls allocate


@dataclass(frozen=True)
class Address:
    """Where a struct holds an address: byte ``offset``; of which array, and how far into it."""

    offset: int
    array: str
    plus: int


@dataclass(frozen=True)
class Struct:
    """A parameter passed by value; its addresses are 0 here."""

    name: str
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
        first, and 0 again after each launch) where the launches need them. Of the memory of q, k,
        v and out nothing was touched.
    """

    info: DeviceInfo
    launches: tuple[Launch, ...]
    arrays: dict[str, Any]


def record(info: DeviceInfo, arguments: dict[str, Any]) -> RecordedCall:
    """What `flash_attn_varlen_func` launches for the arguments, NumPy arrays, on a device.

    They are right for every batch within the bounds of these arguments: lengths, tables and the
    content of the arrays may be others.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        What the call itself would raise on the device.
    """
    given = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    device = _Recorder(info, given)
    with use_device(device):
        flash_attn_varlen_func(**arguments)
    free_workspaces()
    return RecordedCall(info, tuple(device.launches), device.used())


@dataclass(eq=False)
class _Recorder:
    """Implements `device.Device`: arrays are NumPy's, and launches are written down."""

    info: DeviceInfo
    arrays: dict[str, Any]
    kernels: dict[Variant, Variant] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    def compile(self, variant: Variant) -> Variant:
        return self.kernels.setdefault(variant, variant)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int | None) -> Any:
        array = np.empty(shape, dtype)
        made = name = _MADE.get(array.dtype.name, "out")
        while name in self.arrays:  # scratch memory that grew, or beside the caller's workspace
            name = f"{made}_{len(self.arrays)}"
        self.arrays[name] = array
        return array

    def pointer(self, array: Any) -> int:
        return int(array.ctypes.data)

    def is_capturing(self, stream: int | None) -> bool:
        return False

    def current_stream(self) -> int:
        return 0

    def encode_tensor_map(self, array: Any, *numbers: Any) -> bytes:
        token = hashlib.blake2b(repr(numbers).encode()).digest() * 2
        _maps[token] = numbers
        return token

    def launch(self, kernel: Variant, plan: Plan, args: KernelArgs, stream: int | None) -> None:
        structs = STRUCTS[kernel.source]
        params: list[Struct | TensorMap] = []
        for i, value in enumerate(args.values):
            if i < len(structs):
                params.append(self._struct(*structs[i], value))
            else:
                params.append(self._map(value))
        self.launches.append(Launch(plan, tuple(params)))

    def used(self) -> dict[str, Any]:
        """The arrays whose addresses are in a launch."""
        names = {
            address.array
            for launch in self.launches
            for param in launch.params
            for address in (param.addresses if isinstance(param, Struct) else (param,))
        }
        return {name: array for name, array in self.arrays.items() if name in names}

    def _struct(self, name: str, layout: ParamsLayout, value: bytes) -> Struct:
        assert len(value) == layout.nbytes, (name, len(value))
        found, image = [], bytearray(value)
        values = layout.unpack(value)
        for key, kind, offset in layout.fields:
            if kind == "ptr" and values[key]:
                found.append(Address(offset, *self._place(values[key])))
                image[offset : offset + 8] = bytes(8)
        return Struct(name, bytes(image), tuple(found))

    def _map(self, token: bytes) -> TensorMap:
        element_type, pointer, *numbers = _maps[token]
        return TensorMap(*self._place(pointer), element_type, *numbers)

    def _place(self, pointer: int) -> tuple[str, int]:
        for name, array in self.arrays.items():
            start = int(array.ctypes.data)
            if start <= pointer < start + max(1, array.nbytes):
                return name, pointer - start
        raise AssertionError(f"{pointer:#x} is in none of {', '.join(self.arrays)}")


_maps: dict[bytes, tuple[Any, ...]] = {}  # by what stands for them; a layout may keep that
