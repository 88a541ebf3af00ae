"""A CUDA device through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import addressof, byref, c_char_p, c_void_p, create_string_buffer
from functools import cache, partial
from operator import attrgetter
from struct import Struct
from typing import Any

from .compile import compiled_file
from .device import DeviceInfo, Kernel
from .driver import driver_function
from .errors import CaptureError, CompileError
from .params import KernelArgs
from .plan import Plan
from .tensor_map import encode_tensor_map
from .variant import Variant

__all__ = ["CuPyDevice", "LoadedKernel", "cupy_device"]

_INVALID_CONTEXT, _NO_TIMING = 201, 2
_POINTERS = tuple(c_char_p * count for count in range(17))
_config = Struct("=7I4xQQI4x").pack  # CUlaunchConfig: shape, stream, attributes and their number
_ATTRIBUTE = create_string_buffer(Struct("=I4xi60x").pack(6, 1))  # programmatic serialization
_ATTRIBUTE_ADDRESS = addressof(_ATTRIBUTE)


class LoadedKernel:
    """A CUfunction, and what keeps its module loaded."""

    __slots__ = ("function", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner, self.function = owner, c_void_p(owner.ptr)


class _RawStream:
    """A stream handle as CuPy takes it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


@cache
def cupy_device(ordinal: int) -> CuPyDevice:
    """The one object of a device."""
    return CuPyDevice(ordinal)


class CuPyDevice:
    """Implements `device.Device`; make it with `cupy_device`.

    Every call of an engine passes here several times, so the common case comes first everywhere:
    the current device and the current stream.
    """

    def __init__(self, ordinal: int) -> None:
        import cupy as cp

        self._cp = cp
        self._runtime = cp.cuda.runtime
        self._current_stream = cp.cuda.get_current_stream
        self._launch = driver_function("cuLaunchKernelEx")
        self._context = cp.cuda.Device(ordinal)
        self._alone = self._runtime.getDeviceCount() == 1
        self._events: list[int] = []
        self.ordinal = ordinal
        self.kernels: dict[Variant, Kernel] = {}
        self._sides: dict[int, Any] = {}
        found = self._runtime.getDeviceProperties(ordinal)
        self.info = DeviceInfo(
            name=found["name"].decode(),
            ordinal=ordinal,
            capability=(found["major"], found["minor"]),
            num_sms=found["multiProcessorCount"],
            smem_optin=found["sharedMemPerBlockOptin"],
            l2_bytes=found["l2CacheSize"],
        )

    pointer = staticmethod(attrgetter("data.ptr"))

    def compile(self, variant: Variant) -> Kernel:
        path = compiled_file(variant)
        with self._context:
            raw = self._cp.RawModule(path=str(path)).get_function(variant.symbol)
            try:
                kernel = raw.kernel
                # Launches ask for what they need; this only lifts the limit of 48 KiB.
                raw.max_dynamic_shared_size_bytes = self.info.smem_optin - raw.shared_size_bytes
            except self._cp.cuda.driver.CUDADriverError as error:
                driver = self._runtime.driverGetVersion()
                raise CompileError(
                    f"{path} does not load on {self.info.name} (driver for CUDA "
                    f"{driver // 1000}.{driver // 10 % 100}): {error}\nvariant: {variant}"
                ) from error
        return LoadedKernel(kernel)

    def launch(self, kernel: Kernel, plan: Plan, args: KernelArgs, stream: int | None) -> None:
        """By ctypes: CuPy takes long to look at a struct that is passed by value."""
        if not (self._alone or self._runtime.getDevice() == self.ordinal):
            with self._context:
                return self.launch(kernel, plan, args, stream)
        if stream is None:
            stream = self._current_stream().ptr
        values = args.values
        pointers: Any = byref(c_char_p(values[0]))
        if len(values) > 1:
            pointers = _POINTERS[len(values)](*values)
        config = _config(*plan.shape, stream, _ATTRIBUTE_ADDRESS, plan.programmatic)
        status = self._launch(config, kernel.function, pointers, None)
        if status == _INVALID_CONTEXT:  # a thread that has not used the device yet
            self._context.use()
            self._runtime.free(0)
            status = self._launch(config, kernel.function, pointers, None)
        if status:
            raise self._cp.cuda.driver.CUDADriverError(status)
        return None

    def ready(self, kernel: Kernel, plan: Plan, args: KernelArgs, stream: int) -> Callable[[], int]:
        """A launch with all its arguments, to be queued any number of times.

        It returns a ``CUresult``, and keeps no array alive.
        """
        values = args.values
        pointers = _POINTERS[len(values)](*values)
        config = _config(*plan.shape, stream, _ATTRIBUTE_ADDRESS, plan.programmatic)
        again: partial[int] = partial(self._launch, config, kernel.function, pointers, None)
        again.kernel = kernel  # type: ignore[attr-defined]
        return again if self._alone else partial(self._queue_here, again)

    def _queue_here(self, again: Callable[[], int]) -> int:
        return again() if self._runtime.getDevice() == self.ordinal else _INVALID_CONTEXT

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
        return encode_tensor_map(
            element_type, pointer, shape, strides_bytes, box, swizzle, l2_promotion, oob_fill
        )

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int | None) -> Any:
        if not (self._alone or self._runtime.getDevice() == self.ordinal):
            with self._context:
                return self.empty(shape, dtype, stream)
        current = self._current_stream().ptr
        queue = current if stream is None else stream
        if self._captures(queue):
            raise CaptureError(f"an array of shape {shape} would be allocated")
        if queue == current:
            return self._cp.ndarray(shape, dtype)
        with self._current(queue):
            return self._cp.ndarray(shape, dtype)

    def is_capturing(self, stream: int | None) -> bool:
        if not (self._alone or self._runtime.getDevice() == self.ordinal):
            with self._context:
                return self.is_capturing(stream)
        return self._captures(self._current_stream().ptr if stream is None else stream)

    def _captures(self, stream: int) -> bool:
        try:
            return bool(self._runtime.streamIsCapturing(stream))
        except self._runtime.CUDARuntimeError:
            # The legacy default stream, while another stream that waits for it is captured.
            return True

    def current_stream(self) -> int:
        if self._alone or self._runtime.getDevice() == self.ordinal:
            return int(self._current_stream().ptr)
        with self._context:
            return int(self._current_stream().ptr)

    @contextmanager
    def on_stream(self, stream: int | None) -> Iterator[None]:
        """Array operations of the block run here, and on ``stream`` if it is given."""
        with self._context, self._current(stream):
            yield

    def beside(self, stream: int) -> int:
        """A stream that runs beside this one; the same at every call."""
        with self._context:
            made = self._sides.get(stream) or self._cp.cuda.Stream(non_blocking=True)
            return int(self._sides.setdefault(stream, made).ptr)

    def order(self, first: int, then: int) -> None:
        """What is queued on stream ``then`` from here on comes after what is on ``first``."""
        if not (self._alone or self._runtime.getDevice() == self.ordinal):
            with self._context:
                return self.order(first, then)
        try:
            event = self._events.pop()
        except IndexError:
            event = self._runtime.eventCreateWithFlags(_NO_TIMING)
        self._runtime.eventRecord(event, first)
        self._runtime.streamWaitEvent(then, event)
        self._events.append(event)  # what waits has seen this record; the next does not move it
        return None

    def _current(self, stream: int | None) -> AbstractContextManager[Any]:
        """Makes a raw handle the current stream, so that the memory pool orders by it."""
        streams = self._cp.cuda.Stream
        if stream is None:
            return nullcontext()
        if stream in (0, 1):
            return streams.null  # type: ignore[no-any-return]
        if stream == 2:
            return streams.ptds  # type: ignore[no-any-return]
        return streams.from_external(_RawStream(stream))  # type: ignore[no-any-return]
