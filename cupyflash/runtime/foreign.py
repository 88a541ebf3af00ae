"""Arrays of other libraries, over their own memory: never copied, never waited for on the host.

An array that another stream still writes is ordered on the device: its library is told which stream
the call goes to (DLPack), or that stream waits for the array's (``__cuda_array_interface__``). Not
while the call is captured: a graph holds no event of a stream outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .cupy_import import load_cupy

if TYPE_CHECKING:
    from .cupy_device import CuPyDevice

__all__ = ["NO_WAIT", "Consumer", "adopt", "is_array"]

_CPU, _CUDA, _CUDA_MANAGED = 1, 2, 13
NO_WAIT = -1
"""As DLPack and the array interface number streams: 1 legacy, 2 per thread."""

_WRITTEN = frozenset(
    ("out", "lse", "output", "output_lse", "key_cache", "value_cache", "k_cache", "v_cache")
)


def is_array(value: Any) -> bool:
    """Whether a value is an array of any library."""
    return isinstance(value, np.ndarray) or (
        not isinstance(value, np.generic)
        and any(hasattr(value, name) for name in ("__dlpack__", "__cuda_array_interface__"))
    )


class Consumer:
    """Where the arrays of one call will be used.

    Parameters
    ----------
    stream : int or stream, optional
        The current stream of their device if None.
    """

    __slots__ = ("_found", "_ordered", "_stream", "settled")

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self.settled: Any = None  # a library whose work is ordered, for who asks often
        self._found: dict[int, tuple[CuPyDevice, int]] = {}
        self._ordered: set[Any] | None = None

    def after(self, producer: Callable[[int], int], ordinal: int, who: Any = None) -> None:
        """Order what a library has queued before the call, once a call.

        Parameters
        ----------
        producer : callable
            The handle of the library's stream on a device.
        ordinal : int
        who : hashable, optional
            Whose stream it is, if not ``producer``'s own.
        """
        who = (who or producer, ordinal)
        if self._ordered is None:
            self._ordered = set()
        elif who in self._ordered:
            return
        device, stream = self.on(ordinal)
        if stream != NO_WAIT:
            other = producer(ordinal) or 1
            if other != stream:
                device.order(other, stream)
        self._ordered.add(who)

    def on(self, ordinal: int) -> tuple[CuPyDevice, int]:
        """A device, and its stream as DLPack numbers streams; `NO_WAIT` while it is captured."""
        found = self._found.get(ordinal)
        if found is None:
            found = self._found[ordinal] = self._look(ordinal)
        return found

    def _look(self, ordinal: int) -> tuple[CuPyDevice, int]:
        gpus, launches = _modules()
        device, handle = gpus.cupy_device(ordinal), launches.stream_handle(self._stream)
        if handle is None:
            handle = device.current_stream()
        return device, NO_WAIT if device.is_capturing(handle) else handle or 1


@cache
def _modules() -> tuple[Any, Any]:
    """Imported late, and once: an import statement takes as long as a look at an array."""
    from . import cupy_device, launch

    return cupy_device, launch


def adopt(value: Any, name: str, consumer: Consumer) -> Any:
    """A NumPy or CuPy array over the memory of another library's array.

    Parameters
    ----------
    value : object with DLPack or ``__cuda_array_interface__``
    name : str
        The argument, for messages.
    consumer : Consumer

    Returns
    -------
    numpy.ndarray or cupy.ndarray

    Raises
    ------
    TypeError
        It is no array, lies where no kernel of ours can read it, is of a type that cannot be
        exchanged, or its library does not hand it out.
    ValueError
        It will be written, and is read-only.
    """
    if hasattr(value, "__dlpack_device__"):
        kind, ordinal = value.__dlpack_device__()
        if kind == _CPU:
            return _on_cpu(value, name)
        if kind not in (_CUDA, _CUDA_MANAGED):
            raise TypeError(
                f"{name} is on DLPack device type {int(kind)}; use a CUDA or a CPU array"
            )
        _refuse_read_only(value, name)
        return _by_dlpack(value, name, (int(kind), ordinal), consumer.on(ordinal)[1])
    if hasattr(value, "__cuda_array_interface__"):
        _refuse_read_only(value, name)
        return _by_interface(value, name, consumer)
    raise TypeError(
        f"{name} is {type(value).__name__}; pass a NumPy or CuPy array, or one with DLPack or "
        "__cuda_array_interface__"
    )


def _on_cpu(value: Any, name: str) -> Any:
    try:
        return np.from_dlpack(value)
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        try:  # NumPy's DLPack has no bfloat16, which JAX hands out as an array of ml_dtypes
            return np.asarray(value, copy=False)
        except (TypeError, ValueError, RuntimeError):
            raise _not_exchanged(value, name, error) from error


def _not_exchanged(value: Any, name: str, error: Exception) -> TypeError:
    dtype = getattr(value, "dtype", "?")
    return TypeError(
        f"{name} ({type(value).__name__}, {dtype}) cannot be exchanged: {error}. View bfloat16 as "
        "uint16 there and as ml_dtypes.bfloat16 here; view fp8 as uint8, and name the format by "
        "fp8_dtype"
    )


class _Exported:
    """Hands on a DLPack capsule, telling the exporter the stream that the call goes to."""

    def __init__(self, value: Any, device: tuple[int, int], stream: int) -> None:
        self._value, self._device = value, device
        self._stream: int | None = stream
        if stream == NO_WAIT and type(value).__module__.startswith("jax"):
            self._stream = None  # JAX takes -1 for the address of a stream, and None for no wait

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **ignored: Any) -> Any:
        return self._value.__dlpack__(stream=self._stream)


def _by_dlpack(value: Any, name: str, device: tuple[int, int], stream: int) -> Any:
    try:
        return load_cupy().from_dlpack(_Exported(value, device, stream))
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        raise _not_exchanged(value, name, error) from error


class _Interface:
    """The array interface without its stream, for which CuPy would wait on the host."""

    def __init__(self, value: Any, interface: dict[str, Any]) -> None:
        self._owner = value
        self.__cuda_array_interface__ = {**interface, "stream": None}


def _by_interface(value: Any, name: str, consumer: Consumer) -> Any:
    interface = value.__cuda_array_interface__
    if not interface["data"][0]:  # no elements, so no address
        return load_cupy().empty(interface["shape"], interface["typestr"])
    try:
        array = load_cupy().asarray(_Interface(value, interface))
    except (RuntimeError, TypeError, ValueError) as error:
        raise _not_exchanged(value, name, error) from error
    producer = interface.get("stream")
    if producer is not None:
        device, stream = consumer.on(array.data.device_id)
        if stream not in (NO_WAIT, producer):
            device.order(producer, stream)
    return array


def _refuse_read_only(value: Any, name: str) -> None:
    if name not in _WRITTEN:
        return
    try:
        read_only = value.__cuda_array_interface__["data"][1]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return  # of a type that the interface has no name for
    if read_only:
        raise ValueError(
            f"{name} is written, and {type(value).__module__.partition('.')[0]} hands it out as "
            "read-only; pass memory of your own, such as a CuPy array"
        )
