"""Tensors of torch: adopted once, and known again by their own words."""

from __future__ import annotations

import sys
from typing import Any

from .foreign import Consumer, adopt
from .gpu_key import one_gpu
from .kept_views import keep, view_over, views

__all__ = ["Tensors"]

_MOST_SEEN = 8192


class Tensors:
    """How the tensors of a type are looked at.

    A tensor can change all that it is, but says what that is in a fraction of an exchange. What was
    last seen at its address is asked first, in the order of what takes least.
    """

    def __init__(self) -> None:
        self._several = not one_gpu()
        self._last: dict[int, tuple[Any, Any, Any, bool, int, Any]] = {}

    def view(self, value: Any, name: str, consumer: Consumer) -> Any:
        """None where the tensor is not on a GPU, is empty, or is not what its bytes say."""
        try:
            last = self._last.get(value.data_ptr())
            if last is None:
                found = self._look(value, name, consumer)
            else:
                shape, layout, dtype, has_sign, ordinal, found = last
                if (
                    shape != value.shape
                    or layout != (value.is_contiguous() or value.stride())
                    or dtype is not value.dtype
                    or value.requires_grad
                    or (has_sign and value.is_neg())
                    or (self._several and value.get_device() != ordinal)
                ):
                    found = self._look(value, name, consumer)
        except RuntimeError:  # one without memory
            return None
        if found is not None and consumer.settled is not self:
            consumer.after(stream_of_torch, found.data.device_id)
            if not self._several:
                consumer.settled = self
        return found

    def _look(self, value: Any, name: str, consumer: Consumer) -> Any:
        if value.requires_grad or value.is_neg() or not value.is_cuda:
            return None
        address, layout = value.data_ptr(), value.is_contiguous() or value.stride()
        ordinal = value.get_device()
        key = address, value.shape, layout, value.dtype, ordinal
        found = views.get(key)
        if found is None:
            array = adopt(value, name, consumer)
            found = view_over(array.data.ptr, array.dtype, array.shape, array.strides, ordinal)
            if found is None:
                return array
            found = keep(key, found)
        if len(self._last) >= _MOST_SEEN:
            self._last.clear()
        # The imaginary part of a conjugate is the bits of its negative: float16 or float32.
        has_sign = found.dtype.kind == "f"
        self._last[address] = value.shape, layout, value.dtype, has_sign, ordinal, found
        return found


def stream_of_torch(ordinal: int) -> int:
    """The handle of the stream that torch queues work on."""
    torch = sys.modules["torch"]  # its tensors come from there
    try:
        return int(torch._C._cuda_getCurrentRawStream(ordinal))
    except AttributeError:  # it is quick, but not of the public interface
        return int(torch.cuda.current_stream(ordinal).cuda_stream)
