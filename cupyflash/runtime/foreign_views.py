"""Foreign GPU arrays in a warm call: looked at by their protocols' quickest ways, kept by address.

A view does not own its memory: it serves while its array's owner is in the call, and again for
any array that lies there alike. What has no quick way, or nothing to show, goes through
`foreign.adopt`, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import (
    PYFUNCTYPE,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_uint64,
    c_void_p,
    create_string_buffer,
    py_object,
    pythonapi,
    string_at,
)
from struct import Struct
from typing import Any

import ml_dtypes
import numpy as np

from .cupy_import import load_cupy
from .foreign import Consumer, adopt
from .gpu_key import one_gpu

__all__ = ["FOREIGN", "gpu_views"]

FOREIGN: set[Any] = set()
"""Types whose arrays were foreign before: calls on them look for views first."""


_MOST_VIEWS = 8192
_CUDA = 2
# DLTensor: data, device type and number, ndim, type code and bits, lanes, shape, strides, offset.
_tensor = Struct("=QiiiBBHQQQ")
# By type code and bits: what CuPy takes through DLPack too.
_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (0, 32): np.dtype(np.int32), (0, 64): np.dtype(np.int64), (1, 8): np.dtype(np.uint8),
    (2, 16): np.dtype(np.float16), (2, 32): np.dtype(np.float32),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_KINDS = frozenset(kind.str for kind in _TYPES.values() if kind.kind in "fiu")

_views: dict[Any, Any] = {}


def gpu_views(given: Sequence[Any], names: Sequence[str], stream: Any) -> tuple[Any, ...] | None:
    """The arguments with every foreign array on a GPU as a CuPy array; None if there is none.

    Parameters
    ----------
    given : sequence
        Arrays of any library, and what is no array; neither is looked at closely.
    names : sequence of str
        What each is called, for messages.
    stream : int or stream, optional
        Where the call goes: work of other streams on the arrays is ordered before it.

    Raises
    ------
    TypeError, ValueError
        As `foreign.adopt`.
    """
    found: list[Any] | None = None
    consumer, looks = Consumer(stream), _looks
    for i, value in enumerate(given):
        look = looks.get(type(value)) or _new_look(type(value))
        if look is _not_foreign:
            continue
        view = look(value, consumer)
        if view is None:
            if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] != _CUDA:
                continue
            view = adopt(value, names[i], consumer)
        if found is None:
            found = list(given)
        found[i] = view
    return None if found is None else tuple(found)


Look = Callable[[Any, Consumer], Any]


def _not_foreign(value: Any, consumer: Consumer) -> None:
    """Of CuPy, NumPy, or no array at all."""


def _no_quick_way(value: Any, consumer: Consumer) -> None:
    """It has to be adopted, if it is on a GPU."""


_looks: dict[Any, Look] = {}


def _new_look(kind: Any) -> Look:
    look = _looks.setdefault(kind, _look_of(kind))
    if look is not _not_foreign:
        FOREIGN.add(kind)
    return look


def _look_of(kind: Any) -> Look:
    """How arrays of a type are looked at: a view, or None where they have to be adopted."""
    if kind.__module__.partition(".")[0] == "cupy" or issubclass(kind, (np.ndarray, np.generic)):
        return _not_foreign
    if hasattr(kind, "__dlpack__"):
        exchange = _exchange_of(kind)
        return _no_quick_way if exchange is None else exchange.view
    return _by_interface if hasattr(kind, "__cuda_array_interface__") else _not_foreign


class _Exchange:
    """Of torch: tensors by DLPack's C interface, and those that were seen by their own words.

    What a tensor says of itself takes a fraction of any exchange, and the interface also names the
    stream that the library works on.
    """

    def __init__(self, address: int) -> None:
        functions = Struct("=QQ").unpack(string_at(address + 40, 16))
        self._look = PYFUNCTYPE(c_int, py_object, c_void_p)(functions[0])
        self._working_on = PYFUNCTYPE(c_int, c_int, c_int32, c_void_p)(functions[1])

    def view(self, value: Any, consumer: Consumer) -> Any:
        """None where the tensor is not on a GPU, is empty, or is not what its bytes say."""
        try:
            key = (
                value.data_ptr(), value.shape, value.stride(), value.dtype, value.requires_grad,
                value.is_neg(),
            )  # fmt: skip
        except RuntimeError:  # one without memory
            return None
        found = _views.get(key)  # none are kept where there are several GPUs
        if found is not None and consumer.settled is self:
            return found
        if found is None:
            found = None if key[-2] or key[-1] else self._new_view(value, key)
            if found is None:
                return None
        if consumer.settled is not self:
            try:
                consumer.after(self.working_on, found.data.device_id)
            except LookupError:  # `__dlpack__` orders by itself
                return None
            if one_gpu():
                consumer.settled = self
        return found

    def _new_view(self, value: Any, key: Any) -> Any:
        raw = create_string_buffer(_tensor.size)
        try:
            if self._look(value, raw):
                return None
        except (RuntimeError, BufferError, TypeError, ValueError):  # `adopt` says why
            return None
        data, kind, ordinal, ndim, code, bits, lanes, shape, strides, offset = _tensor.unpack(raw)
        dtype = _TYPES.get((code, bits)) if lanes == 1 else None
        if kind != _CUDA or not data or not strides or not ndim or dtype is None:
            return None
        numbers = Struct(f"={ndim}q")
        counts, steps = (numbers.unpack(string_at(at, numbers.size)) for at in (shape, strides))
        places = [step * dtype.itemsize for step in steps]
        return _keep(key, data + offset, dtype, counts, places, ordinal)

    def working_on(self, ordinal: int) -> int:
        """The handle of the stream that the library queues work on."""
        handle = c_uint64()
        if self._working_on(_CUDA, ordinal, byref(handle)):
            raise LookupError("the library does not say which stream it works on")
        return handle.value


def _exchange_of(kind: Any) -> _Exchange | None:
    """Of torch alone: libraries that have no current stream answer otherwise."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or kind.__module__.partition(".")[0] != "torch":
        return None
    name = b"dlpack_exchange_api"
    is_valid = PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_IsValid", pythonapi))
    if not is_valid(capsule, name):
        return None
    address = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
    found = address(capsule, name)
    major, _ = Struct("=II").unpack(string_at(found, 8))
    return _Exchange(found) if major == 1 else None


def _by_interface(value: Any, consumer: Consumer) -> Any:
    interface = value.__cuda_array_interface__
    (data, read_only), strides = interface["data"], interface.get("strides")
    shape, kind, producer = interface["shape"], interface["typestr"], interface.get("stream")
    if read_only or not data or kind not in _KINDS or interface.get("mask") or not one_gpu():
        return None
    key = (data, tuple(shape), kind, strides if strides is None else tuple(strides))
    found = _views.get(key)
    if found is None:
        dtype = np.dtype(kind)
        if strides is None:
            strides = _dense(shape, dtype.itemsize)
        found = _keep(key, data, dtype, shape, strides, 0)
    if found is not None and producer is not None:
        consumer.after(lambda _: producer, 0, (producer,))
    return found


def _dense(shape: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize]
    for count in shape[:0:-1]:
        strides.insert(0, strides[0] * count)
    return strides


def _keep(
    key: Any,
    address: int,
    dtype: np.dtype[Any],
    shape: Sequence[int],
    strides: Sequence[int],
    ordinal: int,
) -> Any:
    """A CuPy array over memory that it does not own; None for an empty one."""
    if 0 in shape or any(step < 0 for step in strides):
        return None
    cp = load_cupy()
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = cp.cuda.UnownedMemory(address, reach, None, ordinal)
    start = cp.cuda.MemoryPointer(memory, 0)
    view = cp.ndarray(tuple(shape), dtype, memptr=start, strides=tuple(strides))
    if not one_gpu():
        return view
    if len(_views) >= _MOST_VIEWS:
        _views.clear()
    return _views.setdefault(key, view)
