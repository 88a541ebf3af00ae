"""Arrays of JAX: immutable, so what was seen of one holds until it is deleted.

JAX works on streams that it does not name. An array that is ready needs no order; until then JAX
itself lets the call's stream wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from .foreign import CUDA, NO_WAIT, WRITTEN, Consumer, adopt
from .gpu_key import one_gpu
from .kept_views import keep, view_over, views

__all__ = ["view_of_jax"]

_MOST_SEEN = 8192
_ready: dict[int, tuple[Callable[[], Any], Any]] = {}
"""Arrays that were ready, and their views, by ``id``; one that is gone is taken for no other."""


def view_of_jax(value: Any, name: str, consumer: Consumer) -> Any:
    """None where the array is not on one GPU, or cannot be used: `adopt` says why."""
    if name in WRITTEN:
        return None
    seen = _ready.get(id(value))
    if seen is not None and seen[0]() is value and not value.is_deleted():
        return seen[1]
    try:
        key = value.unsafe_buffer_pointer(), value.aval, value._pjrt_layout
        found, ready = views.get(key), value.is_ready()
    except (RuntimeError, ValueError):  # deleted, or in parts
        return None
    if found is None:
        if value.__dlpack_device__()[0] != CUDA:
            return None
        array = adopt(value, name, consumer)
        ordinal = array.data.device_id
        found = view_over(array.data.ptr, array.dtype, array.shape, array.strides, ordinal)
        if found is None:
            return array
        if one_gpu():
            keep(key, found)
    elif not ready and (stream := consumer.told(found.data.device_id)) != NO_WAIT:
        value.__dlpack__(stream=stream)
    if ready:
        if len(_ready) >= _MOST_SEEN:
            _ready.clear()
        _ready[id(value)] = ref(value), found
    return found
