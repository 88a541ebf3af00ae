"""Captured calls on every path: a CUDA graph, the emulator's recorded launches, or calls again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from cupyflash.runtime.device import active_device

__all__ = ["capture"]


def capture(path: Any, call: Callable[[], Any]) -> Any:
    """The graph of a call that is warm; ``replay()`` runs it, ``kernels`` counts its launches.

    What the host decides, it decides here: a replay sees new values in the same arrays, and no
    other plan. On NumPy there is nothing to capture and a replay is a call.
    """
    call()
    if path.name == "gpu":
        return _CudaGraph(path.xp, call)
    return _Launches(call) if active_device() else _Calls(call)


class _CudaGraph:
    def __init__(self, cp: Any, call: Callable[[], Any]) -> None:
        cp.cuda.Device().synchronize()
        self._device, self._stream = cp.cuda.Device(), cp.cuda.Stream(non_blocking=True)
        with self._stream:
            call()
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                call()
            finally:
                self._graph = self._stream.end_capture()

    def replay(self) -> None:
        self._device.synchronize()
        self._graph.launch(self._stream)
        self._stream.synchronize()

    @property
    def kernels(self) -> int:
        count = ctypes.c_size_t()
        nodes = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
        assert nodes(ctypes.c_void_p(self._graph.graph), None, ctypes.byref(count)) == 0
        return count.value


class _Launches:
    """Launches with the arguments that were packed for them, as a graph keeps them."""

    def __init__(self, call: Callable[[], Any]) -> None:
        device: Any = active_device()
        self._device, self._recorded = device, []
        with _capturing(device, self._recorded):
            call()

    def replay(self) -> None:
        for kernel, plan, args, stream in self._recorded:
            self._device.launch(kernel, plan, args, stream)

    @property
    def kernels(self) -> int:
        return len(self._recorded)


@contextmanager
def _capturing(device: Any, recorded: list[Any]) -> Any:
    device.launch = lambda *launch: recorded.append(launch)
    device.is_capturing = lambda stream=None: True
    try:
        yield
    finally:
        del device.launch, device.is_capturing


class _Calls:
    kernels = 0

    def __init__(self, call: Callable[[], Any]) -> None:
        self.replay = call
