"""A CUDA device through CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from .compile import compiled_file
from .device import DeviceInfo, Kernel
from .errors import CaptureError, CompileError
from .params import KernelArgs
from .plan import Plan
from .tensor_map import encode_tensor_map
from .variant import Variant

__all__ = ["CuPyDevice", "cupy_device"]


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
    """Implements `device.Device`; make it with `cupy_device`."""

    def __init__(self, ordinal: int) -> None:
        import cupy as cp

        self._cp = cp
        self._runtime = cp.cuda.runtime
        self._context = cp.cuda.Device(ordinal)
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
        queue = None if stream is None else _RawStream(stream)
        if self._runtime.getDevice() == self.ordinal:
            kernel(plan.grid, plan.block, args.values, plan.smem_bytes, queue)
            return
        with self._context:
            kernel(plan.grid, plan.block, args.values, plan.smem_bytes, queue)

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
    ) -> np.ndarray[Any, Any]:
        return encode_tensor_map(
            element_type, pointer, shape, strides_bytes, box, swizzle, l2_promotion, oob_fill
        )

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int | None) -> Any:
        if self.is_capturing(stream):
            raise CaptureError(f"an array of shape {shape} would be allocated")
        with self._context, self._current(stream):
            return self._cp.empty(shape, dtype)

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def is_capturing(self, stream: int | None) -> bool:
        with self._context:
            handle = self.current_stream() if stream is None else stream
            try:
                return bool(self._runtime.streamIsCapturing(handle))
            except self._runtime.CUDARuntimeError:
                # The legacy default stream, while another stream that waits for it is captured.
                return True

    def current_stream(self) -> int:
        with self._context:
            return int(self._cp.cuda.get_current_stream().ptr)

    @contextmanager
    def on_stream(self, stream: int | None) -> Iterator[None]:
        """Array operations of the block run here, and on ``stream`` if it is given."""
        with self._context, self._current(stream):
            yield

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
