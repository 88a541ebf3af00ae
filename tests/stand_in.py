"""A GPU without a GPU: arrays without memory, and a device that takes launches and does nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from cupyflash import kept_launches, known_call, known_cascade
from cupyflash.runtime import call, merge_launch, write_launch
from cupyflash.runtime.attention_params import ATTENTION_PARAMS
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.gpu_key import Known


class Array:
    """As much of a CuPy array as a call touches; no memory."""

    def __init__(self, shape, dtype, ptr=1 << 20, strides=None, ordinal=0):
        plain = np.lib.stride_tricks.as_strided(np.empty(0, dtype), shape, writeable=False)
        contiguous = np.empty(shape, dtype) if np.prod(shape) < 1 << 24 else plain
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.strides = contiguous.strides if strides is None else strides
        self._c_contiguous = self.strides == contiguous.strides
        self.ndim, self.size = len(self.shape), int(np.prod(shape))
        self.itemsize, self.nbytes = self.dtype.itemsize, self.size * self.dtype.itemsize
        self.data = SimpleNamespace(device_id=ordinal, ptr=ptr)

    def fill(self, value):
        """Nothing, as there is no memory."""

    def __getitem__(self, index):
        one = np.empty(1, self.dtype)
        view = np.lib.stride_tricks.as_strided(one, self.shape, self.strides)[index]
        offset = view.__array_interface__["data"][0] - one.__array_interface__["data"][0]
        at = self.data.ptr + offset
        return Array(view.shape, self.dtype, at, view.strides, self.data.device_id)

    def reshape(self, *shape):
        return Array(shape, self.dtype, self.data.ptr, ordinal=self.data.device_id)


Array.__module__ = "cupy"


class StandIn:
    """A device that takes launches and does nothing."""

    def __init__(self, capability=(8, 0)):
        self.info = DeviceInfo("a GPU", 0, capability, 108, 166912)
        self.kernels, self.launches = {}, []
        self.again = self.status = 0

    def compile(self, variant):
        return variant.symbol

    def launch(self, kernel, plan, args, stream):
        self.launches.append((kernel, plan, args, stream))

    def ready(self, *launch):
        times = [0]

        def queue():
            self.again += times[0] > 0
            times[0] += 1
            if not self.status:
                self.launches.append(launch)
            return self.status

        return queue

    def encode_tensor_map(self, array, *asked):
        return repr(asked).encode()[:128].ljust(128)

    def empty(self, shape, dtype, stream):
        return Array(shape, dtype, 7 << 20)

    def pointer(self, array):
        return array.data.ptr

    def is_capturing(self, stream):
        return False

    def current_stream(self):
        return 0


def forget():
    """Start with nothing kept of earlier calls."""
    for kept in (
        call._layouts, known_call._known, known_cascade._known, kept_launches._recordings,
    ):  # fmt: skip
        kept.clear()
    for module in (write_launch, merge_launch):
        module._known = Known()
        module._shape.cache_clear()


def decode(batch=2, ptr=1 << 20, **changes):
    arguments = {
        "q": Array((batch, 8, 64), np.float16, ptr),
        "k": Array((9, 16, 2, 64), np.float16, ptr + 4096),
        "v": Array((9, 16, 2, 64), np.float16, ptr + 8192),
        "max_seqlen_q": 1,
        "cu_seqlens_q": Array((batch + 1,), np.int32, ptr + 16),
        "max_seqlen_k": 64,
        "seqused_k": Array((batch,), np.int32, ptr + 32),
        "block_table": Array((batch, 4), np.int32, ptr + 48),
        "num_splits": 1,
    }
    return {**arguments, **changes}


def sent(device, layout=ATTENTION_PARAMS):
    return layout.unpack(device.launches[-1][2].values[0])
