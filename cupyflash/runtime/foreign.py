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

__all__ = ["CUDA", "NO_WAIT", "WRITTEN", "Consumer", "adopt", "dlpack_device", "is_array"]

_CPU, CUDA, _CUDA_MANAGED = 1, 2, 13
NO_WAIT = -1
"""As DLPack and the array interface number streams: 1 legacy, 2 per thread."""

_RESULTS = ("out", "lse", "output", "output_lse", "workspace")
WRITTEN = frozenset((*_RESULTS, "key_cache", "value_cache", "k_cache", "v_cache"))
"""Arguments that are written."""


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

    __slots__ = ("_found", "_ordered", "_stream", "_told", "settled")

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self.settled: Any = None  # a library whose work is ordered, for who asks often
        self._found: dict[int, tuple[CuPyDevice, int]] = {}
        self._told: dict[int, int] | None = None
        self._ordered: set[Any] = set()

    def after(self, producer: Callable[[int], int], ordinal: int) -> None:
        """Order what a library has queued before the call, once a call.

        Parameters
        ----------
        producer : callable
            The handle of the library's stream on a device.
        ordinal : int
        """
        who = producer, ordinal
        if who not in self._ordered:
            self.after_stream(producer(ordinal), ordinal)
            self._ordered.add(who)

    def after_stream(self, other: int, ordinal: int = 0) -> None:
        """Order what is queued on a stream before the call, once a call."""
        other = other or 1
        if (other, ordinal) in self._ordered:
            return
        device, stream = self.queue(ordinal)
        if other != stream and self.told(ordinal) != NO_WAIT:
            device.order(other, stream)
        self._ordered.add((other, ordinal))

    def queue(self, ordinal: int) -> tuple[CuPyDevice, int]:
        """A device, and the stream that the call goes to as DLPack numbers streams."""
        found = self._found.get(ordinal)
        if found is None:
            gpus, launches = _modules()
            device, handle = gpus.cupy_device(ordinal), launches.stream_handle(self._stream)
            if handle is None:
                handle = device.current_stream()
            found = self._found[ordinal] = device, handle or 1
        return found

    def told(self, ordinal: int) -> int:
        """The stream that libraries are told: `NO_WAIT` while it is captured."""
        if self._told is None:
            self._told = {}
        stream = self._told.get(ordinal)
        if stream is None:
            device, stream = self.queue(ordinal)
            if device.is_capturing(stream):
                stream = NO_WAIT
            self._told[ordinal] = stream
        return stream


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
    if (device := dlpack_device(value, name)) is not None:
        kind, ordinal = device
        if kind == _CPU:
            return _on_cpu(value, name)
        if kind not in (CUDA, _CUDA_MANAGED):
            raise TypeError(f"{name} is on DLPack device type {kind}; use a CUDA or a CPU array")
        _refuse_read_only(value, name)
        return _by_dlpack(value, name, device, consumer.told(ordinal))
    if hasattr(value, "__cuda_array_interface__"):
        _refuse_read_only(value, name)
        return _by_interface(value, name, consumer)
    raise TypeError(
        f"{name} is {type(value).__name__}; pass a NumPy or CuPy array, or one with DLPack or "
        "__cuda_array_interface__"
    )


def dlpack_device(value: Any, name: str) -> tuple[int, int] | None:
    """Where an array is, by DLPack's numbers; None if it has no DLPack.

    Raises
    ------
    TypeError
        It is in parts on several devices.
    ValueError
        It was deleted.
    """
    if not hasattr(value, "__dlpack_device__"):
        return None
    if hasattr(value, "is_deleted") and value.is_deleted():
        raise ValueError(f"{name} was deleted or donated; it has no memory any more")
    try:
        kind, ordinal = value.__dlpack_device__()
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        raise _not_exchanged(value, name, error) from error
    return int(kind), int(ordinal)


def _on_cpu(value: Any, name: str) -> Any:
    try:
        array = np.from_dlpack(value)
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        try:  # NumPy's DLPack has no bfloat16, which JAX hands out as an array of ml_dtypes
            array = np.asarray(value, copy=False)
        except (TypeError, ValueError, RuntimeError):
            raise _not_exchanged(value, name, error) from error
    if name in WRITTEN and not array.flags.writeable:
        raise _read_only(value, name)
    return array


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
        consumer.after_stream(producer, array.data.device_id)
    return array


def _refuse_read_only(value: Any, name: str) -> None:
    if name not in WRITTEN:
        return
    try:
        read_only = value.__cuda_array_interface__["data"][1]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # Of a type that the interface has no name for. JAX's arrays are all read-only.
        read_only = type(value).__module__.startswith("jax")
    if read_only:
        raise _read_only(value, name)


def _read_only(value: Any, name: str) -> ValueError:
    library = type(value).__module__.partition(".")[0]
    return ValueError(
        f"{name} is written, and {library} hands it out as read-only; pass memory of your own, "
        "such as a NumPy or CuPy array"
    )
