"""A CUDA device through CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_char_p, c_void_p
from functools import cache
from operator import attrgetter
from typing import Any

from .compile import compiled_file
from .device import DeviceInfo, Kernel
from .driver import driver_function
from .errors import CaptureError, CompileError
from .params import KernelArgs
from .plan import Plan
from .tensor_map import encode_tensor_map
from .variant import Variant

__all__ = ["CuPyDevice", "cupy_device"]

_INVALID_CONTEXT = 201


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
        self._launch = driver_function("cuLaunchKernel")
        self._context = cp.cuda.Device(ordinal)
        self._alone = self._runtime.getDeviceCount() == 1
        self.ordinal = ordinal
        self.kernels: dict[Variant, Kernel] = {}
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
        return kernel

    def launch(self, kernel: Kernel, plan: Plan, args: KernelArgs, stream: int | None) -> None:
        if self._is_current():
            self._queue(kernel, plan, args.values, stream)
        else:
            with self._context:
                self._queue(kernel, plan, args.values, stream)

    def _queue(
        self, kernel: Kernel, plan: Plan, values: tuple[bytes, ...], stream: int | None
    ) -> None:
        """By ctypes: CuPy takes 20 us to look at a struct that is passed by value."""
        if stream is None:
            stream = self._current_stream().ptr
        launch = (
            *(c_void_p(kernel.ptr), *plan.grid, *plan.block, plan.smem_bytes, c_void_p(stream)),
            *((c_char_p * len(values))(*values), None),
        )
        status = self._launch(*launch)
        if status == _INVALID_CONTEXT:  # a thread that has not used the device yet
            self._context.use()
            self._runtime.free(0)
            status = self._launch(*launch)
        if status:
            raise self._cp.cuda.driver.CUDADriverError(status)

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
        if self.is_capturing(stream):
            raise CaptureError(f"an array of shape {shape} would be allocated")
        if self._is_current() and (stream is None or stream == self._current_stream().ptr):
            return self._cp.ndarray(shape, dtype)
        with self._context, self._current(stream):
            return self._cp.ndarray(shape, dtype)

    def is_capturing(self, stream: int | None) -> bool:
        if self._is_current():
            return self._captures(stream)
        with self._context:
            return self._captures(stream)

    def _captures(self, stream: int | None) -> bool:
        handle = self._current_stream().ptr if stream is None else stream
        try:
            return bool(self._runtime.streamIsCapturing(handle))
        except self._runtime.CUDARuntimeError:
            # The legacy default stream, while another stream that waits for it is captured.
            return True

    def current_stream(self) -> int:
        if self._is_current():
            return int(self._current_stream().ptr)
        with self._context:
            return int(self._current_stream().ptr)

    @contextmanager
    def on_stream(self, stream: int | None) -> Iterator[None]:
        """Array operations of the block run here, and on ``stream`` if it is given."""
        with self._context, self._current(stream):
            yield

    def order(self, first: int, then: int) -> None:
        """What is queued on stream ``then`` from here on comes after what is on ``first``."""
        with self._context:
            event = self._cp.cuda.Event(disable_timing=True)
            with self._current(first) as stream:
                event.record(stream)
            with self._current(then) as stream:
                stream.wait_event(event)

    def _is_current(self) -> bool:
        return self._alone or bool(self._runtime.getDevice() == self.ordinal)

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
