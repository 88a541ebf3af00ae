"""The seam between the library and what runs its kernels: CuPy, or an emulator in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from .params import KernelArgs
from .plan import Plan
from .variant import Variant

__all__ = [
    "RESERVED_SMEM",
    "Device",
    "DeviceInfo",
    "Kernel",
    "active_device",
    "device_for",
    "use_device",
]

RESERVED_SMEM = 1024
"""Bytes of a multiprocessor's shared memory that every block takes besides its own."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What planning may know of a device.

    Attributes
    ----------
    name : str
    ordinal : int
        CUDA device number.
    capability : tuple of int
        Compute capability, such as ``(9, 0)``.
    num_sms : int
    smem_optin : int
        Largest dynamic shared memory a block can ask for, bytes.
    l2_bytes : int
    """

    name: str
    ordinal: int
    capability: tuple[int, int]
    num_sms: int
    smem_optin: int
    l2_bytes: int = 0
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        values = (self.name, self.ordinal, self.capability, self.num_sms, self.smem_optin)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        """Made once: a warm call finds what was planned for the device by it."""
        return self._hash


Kernel = Any
"""A loaded kernel; only the device that loaded it knows its type."""


class Device(Protocol):
    """Where kernels run. Thread-safe.

    One that also has ``ready``, with the parameters of ``launch``, returns a launch from it as
    something to call: it queues the launch, any number of times, and returns a ``CUresult``.
    """

    kernels: dict[Variant, Kernel]
    """What is loaded; ``compile.load_kernel`` looks here first."""

    @property
    def info(self) -> DeviceInfo: ...

    def compile(self, variant: Variant) -> Kernel:
        """A kernel ready to launch, from ``kernel_source(variant)``."""

    def launch(self, kernel: Kernel, plan: Plan, args: KernelArgs, stream: int | None) -> None:
        """Queue one launch. ``stream`` is a raw handle; None is the current stream."""

    def encode_tensor_map(
        self,
        array: Any,
        element_type: int,
        pointer: int,
        shape: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
        l2_promotion: int,
        oob_fill: int,
    ) -> bytes:
        """A packed 128-byte tensor map; enums are those of ``cuTensorMapEncodeTiled``."""

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int | None) -> Any:
        """An uninitialised array on the device."""

    def pointer(self, array: Any) -> int:
        """The address of an array's first element."""

    def is_capturing(self, stream: int | None) -> bool:
        """Whether the stream is being captured into a graph."""

    def current_stream(self) -> int:
        """The raw handle that ``stream=None`` stands for."""

    def beside(self, stream: int) -> int:
        """A stream that runs beside this one; the same at every call."""

    def order(self, first: int, then: int) -> None:
        """What is queued on stream ``then`` from here on comes after what is on ``first``."""


_active: ContextVar[Device | None] = ContextVar("cupyflash_device", default=None)


active_device: Callable[[], Device | None] = _active.get
"""The device that ``use_device`` set in this context, else None (the arrays decide)."""


def device_for(array: Any) -> Device:
    """Where a call on this array runs: the device of ``use_device``, else the array's GPU."""
    device = _active.get()
    if device is not None:
        return device
    return _gpus().cupy_device(array.data.device_id)  # type: ignore[no-any-return]


@cache
def _gpus() -> Any:
    from . import cupy_device

    return cupy_device


@contextmanager
def use_device(device: Device) -> Iterator[Device]:
    """Run every kernel of the block on ``device``, whatever kind of arrays are passed."""
    token = _active.set(device)
    try:
        yield device
    finally:
        _active.reset(token)
