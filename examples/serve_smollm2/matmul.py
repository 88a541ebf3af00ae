"""Matrix products of the model: NumPy's, or cuBLAS called directly.

CuPy refuses its own cuBLAS calls while a stream is being captured, so the GPU's products call the
library that CuPy has loaded, with a workspace that captured products may keep.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .batch import Array

__all__ = ["Matmul", "make_matmul"]

_FLOAT32, _FLOAT16 = 0, 2  # cudaDataType
_COMPUTE_32F = 68
_TRANSPOSED, _AS_IS = 1, 0
_DEFAULT_ALGORITHM = -1
_WORKSPACE_BYTES = 32 << 20


class Matmul:
    """``x @ weight.T`` for x [tokens, in] and weight [out, in], both C-contiguous."""

    def __call__(self, x: Array, weight: Array, dtype: Any = None) -> Array:
        """The product [tokens, out], in ``dtype`` or that of x."""
        return (x @ weight.T).astype(x.dtype if dtype is None else dtype, copy=False)


class CublasMatmul(Matmul):
    """The same in float16 with float32 sums; of one thread."""

    def __init__(self) -> None:
        import cupy

        cupy.cuda.Device().cublas_handle  # noqa: B018  loads the library
        version = cupy.cuda.runtime.runtimeGetVersion() // 1000
        self._library = ctypes.CDLL(f"libcublas.so.{version}")
        self._xp, self._handle, self._stream = cupy, ctypes.c_void_p(), -1
        self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._workspace = cupy.empty(_WORKSPACE_BYTES, np.uint8)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def __call__(self, x: Array, weight: Array, dtype: Any = None) -> Array:
        if x.dtype != np.float16 or weight.dtype != np.float16:
            raise TypeError(f"x is {x.dtype}, weight is {weight.dtype}; both must be float16")
        self._use_stream(self._xp.cuda.get_current_stream().ptr)
        x = self._xp.ascontiguousarray(x)
        (tokens, width), outputs = x.shape, weight.shape[0]
        out = self._xp.empty((tokens, outputs), x.dtype if dtype is None else dtype)
        kind = _FLOAT32 if out.dtype == np.float32 else _FLOAT16
        pointer, size = ctypes.c_void_p, ctypes.c_int
        # cuBLAS counts columns first: row-major arrays are its transposes.
        self._check(
            self._library.cublasGemmEx(
                self._handle, _TRANSPOSED, _AS_IS, size(outputs), size(tokens), size(width),
                ctypes.byref(self._one), pointer(weight.data.ptr), _FLOAT16, size(width),
                pointer(x.data.ptr), _FLOAT16, size(width), ctypes.byref(self._zero),
                pointer(out.data.ptr), kind, size(outputs), _COMPUTE_32F, _DEFAULT_ALGORITHM,
            )
        )  # fmt: skip
        return out

    def _use_stream(self, stream: int) -> None:
        if stream == self._stream:
            return
        self._check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))
        # A new stream takes the workspace away; without one a captured product would allocate.
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        size = ctypes.c_size_t(_WORKSPACE_BYTES)
        self._check(self._library.cublasSetWorkspace_v2(self._handle, workspace, size))
        self._stream = stream

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS returned status {status}")


def make_matmul(xp: Any) -> Matmul:
    """The product for arrays of NumPy or CuPy."""
    return Matmul() if xp is np else CublasMatmul()
