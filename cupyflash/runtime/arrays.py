"""The arrays of a call: whose memory they are, and what the rules may see of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from .device import active_device
from .foreign import Consumer, adopt
from .foreign_views import gpu_views

__all__ = [
    "ArraySpec",
    "AttentionArrays",
    "array_module",
    "as_array",
    "as_shaped",
    "merge_leading",
    "on_stream",
    "place",
    "spec_of",
    "specs",
]

_NONE = type(None)


class AttentionArrays(NamedTuple):
    """The arrays of one attention call; None where an optional one is absent."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    block_table: Any = None
    alibi_slopes: Any = None
    s_aux: Any = None
    out: Any = None
    lse: Any = None
    q_v: Any = None


class ArraySpec(NamedTuple):
    """Shape, dtype and strides (bytes) of an array: no memory, no address."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]

    @property
    def unit_stride(self) -> bool:
        """Whether the last dimension is contiguous."""
        shape = self.shape
        if not shape or shape[-1] == 1 or 0 in shape:
            return True
        return bool(self.strides[-1] == self.dtype.itemsize)

    @property
    def overlaps(self) -> bool:
        """Whether two elements share memory because a stride is 0."""
        return 0 not in self.shape and any(
            n > 1 and not s for n, s in zip(self.shape, self.strides, strict=True)
        )


def specs(arrays: Sequence[Any]) -> tuple[tuple[Any, ...] | None, ...]:
    """Shape, dtype and strides of each array as plain tuples: a key that is quick to make."""
    return tuple([None if a is None else (a.shape, a.dtype, a.strides) for a in arrays])


def spec_of(array: Any) -> ArraySpec | None:
    """The spec of an array; None for None."""
    return None if array is None else ArraySpec(array.shape, array.dtype, array.strides)


def as_array(value: Any, name: str, stream: Any = None) -> Any:
    """The argument as a NumPy or CuPy array over the same memory, usable on ``stream``.

    Raises
    ------
    TypeError, ValueError
        As `foreign.adopt`.
    """
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if type(value).__module__.partition(".")[0] == "cupy":
        return value
    if type(stream) is Consumer:
        return adopt(value, name, stream)
    views = gpu_views((value,), (name,), stream)
    return adopt(value, name, Consumer(stream)) if views is None else views[0]


def as_shaped(value: Any, name: str, ndim: int, stream: Any = None) -> Any:
    """As `as_array`, of that many dimensions.

    Raises
    ------
    TypeError, ValueError
        As `foreign.adopt`; or it has others.
    """
    array = as_array(value, name, stream)
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; it must have {ndim} dimensions")
    return array


def address_of(array: Any) -> int:
    """Of the first element of an array of NumPy's or CuPy's."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


def array_module(array: Any) -> Any:
    """``numpy`` or ``cupy``, whichever the array is of."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def on_stream(array: Any, stream: Any, temporaries: str = "") -> AbstractContextManager[None]:
    """Operations on arrays in the block join a call on this array and stream, if it is a GPU's.

    Raises
    ------
    CaptureError
        The stream is being captured, and the block makes arrays for itself: ``temporaries`` says
        what for. They would be freed while the graph still uses them.
    """
    if isinstance(array, np.ndarray):
        return nullcontext()
    from .cupy_device import cupy_device
    from .errors import CaptureError
    from .launch import stream_handle

    device, handle = cupy_device(array.data.device_id), stream_handle(stream)
    if temporaries and device.is_capturing(handle):
        raise CaptureError(
            f"arrays for {temporaries} would be allocated",
            "call flash_attn_varlen_func with arrays of your own",
        )
    return device.on_stream(handle)


def place(
    names: Sequence[str], arrays: Sequence[Any], stream: Any = None, required: int = 0
) -> tuple[Sequence[Any], bool]:
    """The arrays as NumPy's or CuPy's, and whether the call is computed with NumPy.

    It is where all of them are NumPy arrays and no device is set. None is passed on, but not of
    the first ``required``. Arrays of other libraries are ready for ``stream``.

    Raises
    ------
    TypeError
        Something is not an array, or some are NumPy arrays and some are on a GPU.
    ValueError
        They are on several GPUs.
    """
    for name, array in zip(names[:required], arrays, strict=False):
        if array is None:
            raise TypeError(f"{name} is None; it must be an array")
    kinds = set(map(type, arrays))
    kinds.discard(_NONE)
    if kinds == {np.ndarray}:
        return arrays, active_device() is None
    if len(kinds) != 1 or kinds.pop().__module__ != "cupy":
        consumer = Consumer(stream)
        arrays = [
            a if a is None else as_array(a, n, consumer) for n, a in zip(names, arrays, strict=True)
        ]
        _check_one_side(names, arrays)
        if isinstance(next(a for a in arrays if a is not None), np.ndarray):
            return arrays, active_device() is None
    ordinals = {a.data.device_id for a in arrays if a is not None}
    if len(ordinals) > 1:
        where = ", ".join(
            f"{n} on {a.data.device_id}"
            for n, a in zip(names, arrays, strict=True)
            if a is not None
        )
        raise ValueError(f"arrays of one call are on several GPUs: {where}; use one GPU a call")
    return arrays, False


def _check_one_side(names: Sequence[str], arrays: Sequence[Any]) -> None:
    given = [
        (n, isinstance(a, np.ndarray)) for n, a in zip(names, arrays, strict=True) if a is not None
    ]
    host = [n for n, on_host in given if on_host]
    device = [n for n, on_host in given if not on_host]
    if host and device:
        raise TypeError(
            f"NumPy arrays ({', '.join(host)}) and GPU arrays ({', '.join(device)}) in one call; "
            "put all of them on one side"
        )


def merge_leading(array: Any, name: str, copy: bool = False) -> Any:
    """``[a, b, ...]`` as ``[a * b, ...]``, over the same memory.

    Raises
    ------
    ValueError
        The strides do not allow it and ``copy`` is False.
    """
    first, second = array.shape[:2]
    mergeable = first <= 1 or second == 0 or array.strides[0] == second * array.strides[1]
    if not mergeable and not copy:
        raise ValueError(
            f"{name} with shape {array.shape} and strides {array.strides}: the first stride must "
            "be that of whole sequences, so that rows can be numbered through"
        )
    return array.reshape(first * second, *array.shape[2:])
