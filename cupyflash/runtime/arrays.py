"""Which side an argument's memory is on: NumPy arrays, or arrays of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from .device import active_device

__all__ = ["array_module", "as_array", "merge_leading", "on_host"]


def as_array(value: Any, name: str) -> Any:
    """The argument as a NumPy or CuPy array, without a copy.

    Any object with ``__cuda_array_interface__`` or DLPack on a GPU becomes a CuPy array over the
    same memory.

    Raises
    ------
    TypeError
        It is not an array, or lies where no kernel of ours can read it.
    """
    if isinstance(value, np.ndarray) or type(value).__module__.startswith("cupy"):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        import cupy as cp

        return cp.asarray(value)
    if hasattr(value, "__dlpack_device__"):
        kind = int(value.__dlpack_device__()[0])
        if kind == 1:
            return np.from_dlpack(value)
        if kind in (2, 13):  # CUDA, CUDA managed
            import cupy as cp

            return cp.from_dlpack(value)
        raise TypeError(f"{name} is on DLPack device type {kind}; use a CUDA or a CPU array")
    raise TypeError(
        f"{name} is {type(value).__name__}; pass a NumPy or CuPy array, or one with DLPack or "
        "__cuda_array_interface__"
    )


def on_host(**arrays: Any) -> bool:
    """Whether a call computes with NumPy: all of its arrays are NumPy's and no device is set.

    ``arrays`` holds those that ``as_array`` gave, or None for absent ones.

    Raises
    ------
    TypeError
        Some are NumPy arrays and some are on a GPU.
    ValueError
        They are on several GPUs.
    """
    host = {name for name, a in arrays.items() if isinstance(a, np.ndarray)}
    device = {name: a.device.id for name, a in arrays.items() if a is not None and name not in host}
    if host and device:
        raise TypeError(
            f"NumPy arrays ({', '.join(sorted(host))}) and GPU arrays "
            f"({', '.join(sorted(device))}) in one call; put all of them on one side"
        )
    if len(set(device.values())) > 1:
        where = ", ".join(f"{name} on {ordinal}" for name, ordinal in device.items())
        raise ValueError(f"arrays of one call are on several GPUs: {where}; use one GPU a call")
    return not device and active_device() is None


def array_module(array: Any) -> Any:
    """``numpy`` or ``cupy``, whichever made the array."""
    if isinstance(array, np.ndarray):
        return np
    import cupy as cp

    return cp


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
