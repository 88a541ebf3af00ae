"""Functions of the CUDA driver that CuPy has not, or not as quickly."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["driver_function"]


@cache
def driver_function(name: str) -> Any:
    """A function of libcuda by name; it returns a ``CUresult``.

    Raises
    ------
    RuntimeError
        There is no driver, or it is too old to have the function.
    """
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{name} needs an NVIDIA driver of CUDA 12 or later: {error}") from error
    function.restype = ctypes.c_uint32
    return function
