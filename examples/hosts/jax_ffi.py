"""Python functions as XLA custom calls, without a compiler: XLA's C interface through ctypes.

XLA hands a handler the addresses of arguments and results, and on a GPU the stream. The function
gets arrays over them and writes into the results; nothing is copied or allocated. It runs each
time that the compiled program does, with Python's lock held, so it costs what a Python call does.
XLA does not put it into its own CUDA graphs: it does not say that it may.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

_EXECUTE, _METADATA, _INTERNAL_ERROR = 3, 1, 13
_DTYPES = {
    2: np.int8, 4: np.int32, 5: np.int64, 6: np.uint8, 10: np.float16, 11: np.float32,
    16: ml_dtypes.bfloat16, 19: ml_dtypes.float8_e5m2, 20: ml_dtypes.float8_e4m3fn,
}  # fmt: skip


def _struct(name: str, *fields: tuple[str, Any], sized: bool = True) -> type[Structure]:
    head = [("struct_size", c_size_t), ("extension", c_void_p)] if sized else []
    return type(name, (Structure,), {"_fields_": [*head, *fields]})


_Buffer = _struct(
    "Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))
)
_List = _struct("List", ("size", c_int64), ("types", c_void_p), ("items", POINTER(c_void_p)))
_Attributes = _struct(
    "Attributes", ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("items", c_void_p)
)
_Frame = _struct(
    "Frame", ("api", c_void_p), ("context", c_void_p), ("stage", c_int), ("arguments", _List),
    ("results", _List), ("attributes", _Attributes),
)  # fmt: skip
_Version = _struct("Version", ("major", c_int), ("minor", c_int))
_Metadata = _struct(
    "Metadata", ("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32), sized=False
)
_Extension = _struct(
    "Extension", ("struct_size", c_size_t), ("kind", c_int), ("next", c_void_p),
    ("metadata", POINTER(_Metadata)), sized=False,
)  # fmt: skip
_ErrorArguments = _struct("ErrorArguments", ("message", c_char_p), ("code", c_int))
_StreamArguments = _struct("StreamArguments", ("context", c_void_p), ("stream", c_void_p))
_Call = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_Api = _struct(
    "Api", ("version", _Version), ("internal", c_void_p), ("create_error", _Call),
    ("error_message", _Call), ("destroy_error", _Call), ("register", _Call), ("get_stream", _Call),
)  # fmt: skip


def _installed_version() -> tuple[int, int]:
    """The version of the interface that this jaxlib was built with, from its own header."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]  # type: ignore[index]
        for part in ("MAJOR", "MINOR")
    )
    return int(major), int(minor)


class FfiFunction:
    """A function to call inside of ``jax.jit``.

    Parameters
    ----------
    name : str
        Of the custom call; one for each function.
    function : callable
        Called with ``(stream, arguments, results)``: the stream's handle (None on a CPU), and
        lists of NumPy or CuPy arrays.
    platform : str
        ``"CUDA"`` or ``"cpu"``.
    """

    def __init__(
        self, name: str, function: Callable[[Any, list[Any], list[Any]], None], platform: str
    ) -> None:
        self._name, self._function, self._on_gpu = name, function, platform == "CUDA"
        self._version = _installed_version()
        self._handler = _Call(self._handle)  # XLA keeps its address: it lives as long as this
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
        address = ctypes.cast(self._handler, c_void_p)
        jax.ffi.register_ffi_target(name, capsule(address, None, None), platform=platform)

    def __call__(self, results: Sequence[jax.ShapeDtypeStruct], *arguments: Any) -> Any:
        """The results, of these shapes and types; traced by ``jax.jit``."""
        return jax.ffi.ffi_call(self._name, list(results))(*arguments)

    def _handle(self, address: int) -> int | None:
        frame = _Frame.from_address(address)
        if frame.extension:
            extension = _Extension.from_address(frame.extension)
            if extension.kind == _METADATA:
                version = extension.metadata.contents.version
                version.major, version.minor = self._version
                return None
        if frame.stage != _EXECUTE:
            return None
        api = _Api.from_address(frame.api)
        try:
            stream = self._stream(api, frame) if self._on_gpu else None
            self._function(stream, self._arrays(frame.arguments), self._arrays(frame.results))
        except Exception as error:  # the interpreter is not the caller: it goes back as text
            text = f"{self._name}: {type(error).__name__}: {error}".encode()
            given = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _INTERNAL_ERROR)
            return api.create_error(ctypes.addressof(given))
        return None

    @staticmethod
    def _stream(api: Any, frame: Any) -> int:
        asked = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
        if api.get_stream(ctypes.addressof(asked)):
            raise RuntimeError("XLA gives no stream")
        return asked.stream or 0

    def _arrays(self, listed: Any) -> list[Any]:
        return [self._array(_Buffer.from_address(listed.items[i])) for i in range(listed.size)]

    def _array(self, buffer: Any) -> Any:
        shape = tuple(buffer.dims[: buffer.rank]) if buffer.rank else ()
        dtype = np.dtype(_DTYPES[buffer.dtype])
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if not self._on_gpu:
            memory = (ctypes.c_char * nbytes).from_address(buffer.data) if nbytes else b""
            return np.frombuffer(memory, dtype).reshape(shape)
        import cupy as cp

        if dtype.itemsize == 1:
            dtype = np.dtype(np.uint8)  # CuPy has no fp8
        memory = cp.cuda.UnownedMemory(buffer.data or 0, nbytes, None, cp.cuda.Device().id)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))
