"""Arrays that show themselves, and the stream they are written on, by the array interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .cupy_import import load_cupy
from .foreign import Consumer
from .gpu_key import one_gpu
from .kept_views import keep, view_over, views

__all__ = ["view_of_interface"]

_KINDS = frozenset(("<i4", "<i8", "|u1", "<f2", "<f4"))


def view_of_interface(value: Any, name: str, consumer: Consumer) -> Any:
    """None where it has to be adopted."""
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    (data, read_only), strides = interface["data"], interface.get("strides")
    shape, kind, producer = interface["shape"], interface["typestr"], interface.get("stream")
    if read_only or not data or kind not in _KINDS or interface.get("mask"):
        return None
    # Memory of one GPU may come back on another: an address alone says which if there is one.
    ordinal = 0 if one_gpu() else device_of(data)
    key = (data, tuple(shape), kind, strides if strides is None else tuple(strides), ordinal)
    found = views.get(key)
    if found is None:
        dtype = np.dtype(kind)
        if strides is None:
            strides = _dense(shape, dtype.itemsize)
        found = view_over(data, dtype, shape, strides, ordinal)
        if found is None:
            return None
        keep(key, found)
    if producer is not None:
        consumer.after_stream(producer, ordinal)
    return found


def device_of(address: int) -> int:
    """The GPU that an address belongs to."""
    return int(load_cupy().cuda.runtime.pointerGetAttributes(address).device)


def _dense(shape: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize]
    for count in shape[:0:-1]:
        strides.insert(0, strides[0] * count)
    return strides
