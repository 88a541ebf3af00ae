"""Stand-ins for arrays of other libraries, as much of them as a call asks for."""

from __future__ import annotations

__all__ = ["Foreign", "Interface", "Jax", "NumbaArray", "Tensor"]


class Foreign:
    """An array of which nothing is known but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Tensor:
    """A tensor of torch."""

    __module__ = "torch"
    requires_grad = False

    def __init__(self, array, device=2):
        self.array, self.device = array, device

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    is_cuda = property(lambda self: self.device == 2)

    def is_neg(self):
        return False

    def data_ptr(self):
        return self.array.ctypes.data

    def get_device(self):
        return 0

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **options):
        raise BufferError("asked the slow way")


class Interface:
    """A GPU array of which nothing is known but the array interface."""

    def __init__(self, array, stream=None, **changes):
        self.array = array
        found = {"data": (array.ctypes.data, False), "shape": array.shape, "stream": stream}
        found |= {"typestr": array.dtype.str, "strides": array.strides, "version": 3}
        self.__cuda_array_interface__ = found | changes


class NumbaArray:
    """A device array of Numba, which makes its interface anew each time."""

    __module__ = "numba.cuda.cudadrv.devicearray"

    def __init__(self, array, stream=0):
        self.array, self.stream, self.asked = array, stream, 0
        self.gpu_data, self.shape, self.strides = object(), array.shape, array.strides
        self.dtype = array.dtype

    @property
    def __cuda_array_interface__(self):
        self.asked += 1
        return Interface(self.array, self.stream or None).__cuda_array_interface__


class Jax:
    """An array of JAX on a GPU."""

    __module__ = "jaxlib._jax"

    def __init__(self, array, layout="{0}", ready=True, device=2):
        self.array, self._pjrt_layout, self.ready, self.device = array, layout, ready, device
        self.aval = (array.shape, array.dtype)
        self.told, self.deleted, self.asked = [], False, 0

    def unsafe_buffer_pointer(self):
        if self.deleted:
            raise RuntimeError("Array has been deleted")
        self.asked += 1
        return self.array.ctypes.data

    def is_ready(self):
        return self.ready

    def is_deleted(self):
        return self.deleted

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, stream=None):
        self.told.append(stream)
