"""The quick way of foreign GPU arrays into a warm call, with libraries that are stand-ins."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cupyflash.runtime import foreign_views
from cupyflash.runtime.foreign import NO_WAIT, Consumer
from cupyflash.runtime.foreign_views import gpu_views

cupy = pytest.importorskip("cupy")  # its arrays; nothing of them is read
CODES = {"f": 2, "i": 0, "u": 1, "V": 4}
LOOK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.c_void_p)


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("ordinal", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class Api(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3), ("look", LOOK), ("stream", STREAM),
    ]  # fmt: skip


def look(value, out):
    """What the stand-in's array is, as if it lay on a GPU."""
    array = value.array
    tensor = DLTensor.from_address(out)
    value.counts = (ctypes.c_int64 * array.ndim)(*array.shape)
    value.steps = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
    tensor.data, tensor.device, tensor.ordinal = array.ctypes.data, value.device, 0
    tensor.ndim, tensor.code, tensor.bits = array.ndim, CODES[array.dtype.kind], 8 * array.itemsize
    tensor.lanes, tensor.offset = 1, 0
    tensor.shape = ctypes.addressof(value.counts)
    tensor.strides = ctypes.addressof(value.steps)
    value.looks += 1
    return 0


def working_on(device, ordinal, out):
    ctypes.c_uint64.from_address(out).value = 77
    return 0


API = Api(1, 3, None, (ctypes.c_void_p * 3)(), LOOK(look), STREAM(working_on))
NAME = b"dlpack_exchange_api"  # a capsule does not keep its name
new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Tensor:
    """A tensor of a library that has DLPack's C interface."""

    __module__ = "torch"
    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(API), NAME, None)
    requires_grad = False

    def __init__(self, array, device=2):
        self.array, self.device, self.looks = array, device, 0

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def is_neg(self):
        return False

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **options):
        raise BufferError("asked the slow way")


class Interface:
    """A GPU array of which nothing is known but the array interface."""

    def __init__(self, array, stream=None, **changes):
        found = {"data": (array.ctypes.data, False), "shape": array.shape, "stream": stream}
        found |= {"typestr": array.dtype.str, "strides": array.strides, "version": 3}
        self.__cuda_array_interface__ = found | changes

    __cuda_array_interface__ = None


@pytest.fixture
def ordered(monkeypatch):
    """What was ordered: (producer, consumer) streams."""
    found = []
    device = SimpleNamespace(order=lambda first, then: found.append((first, then)))
    stream = SimpleNamespace(handle=5)
    monkeypatch.setattr(Consumer, "on", lambda self, ordinal: (device, stream.handle))
    monkeypatch.setattr(foreign_views, "one_gpu", lambda: True)
    monkeypatch.setattr(foreign_views, "_views", {})
    found_stream = SimpleNamespace(orders=found, stream=stream)
    return found_stream


def arrays():
    rng = np.random.default_rng(0)
    base = rng.standard_normal((6, 4, 128)).astype(np.float16)
    yield base
    yield base[::2, 1:3, :64]
    yield np.arange(7, dtype=np.int32)
    yield np.arange(7)
    yield base.view(np.uint8)
    yield base.astype(np.float32)


@pytest.mark.parametrize("array", [*arrays()], ids=lambda a: f"{a.dtype}{a.shape}")
@pytest.mark.parametrize("kind", [Tensor, Interface])
def test_a_view_is_the_array(array, kind, ordered):
    given = kind(array)
    (found,) = gpu_views((given,), ("q",), None)
    assert isinstance(found, cupy.ndarray)
    assert (found.shape, found.dtype, found.strides) == (array.shape, array.dtype, array.strides)
    assert found.data.ptr == array.ctypes.data
    again = kind(array)
    assert gpu_views((None, 1.0, again), ("a", "b", "q"), None)[2] is found
    assert kind is Interface or again.looks == 0


def test_a_bfloat16_tensor(ordered):
    array = np.zeros((3, 8), ml_dtypes.bfloat16)
    assert gpu_views((Tensor(array),), ("q",), None)[0].dtype == array.dtype


def test_the_same_address_with_another_shape_is_another_view(ordered):
    array = np.zeros((4, 8), np.float16)
    for kind in (Tensor, Interface):
        shapes = [gpu_views((kind(a),), ("q",), None)[0].shape for a in (array, array[:2])]
        assert shapes == [(4, 8), (2, 8)]


def test_a_tensor_whose_memory_moved_is_looked_at_again(ordered):
    tensor = Tensor(np.zeros(4, np.float16))
    first = gpu_views((tensor,), ("q",), None)[0]
    tensor.array = np.zeros(4, np.float16)
    assert gpu_views((tensor,), ("q",), None)[0].data.ptr == tensor.array.ctypes.data
    assert first.data.ptr != tensor.array.ctypes.data


def test_other_streams_are_ordered_once_a_call(ordered):
    given = [Tensor(np.zeros(n, np.float16)) for n in (3, 4)]
    given += [Interface(np.zeros(n, np.float16), stream) for n, stream in ((3, 9), (4, 9), (5, 1))]
    gpu_views(given, "abcde", None)
    assert ordered.orders == [(77, 5), (9, 5), (1, 5)]
    ordered.orders.clear()
    ordered.stream.handle = 77
    gpu_views(given[:2], "ab", None)
    assert ordered.orders == []
    ordered.stream.handle = NO_WAIT
    gpu_views(given, "abcde", None)
    assert ordered.orders == []


def test_with_more_gpus_an_address_says_nothing(ordered, monkeypatch):
    """Memory of one may come back on another: views are made anew."""
    monkeypatch.setattr(foreign_views, "one_gpu", lambda: False)
    monkeypatch.setattr(foreign_views, "adopt", lambda *_: "adopted")
    array = np.zeros(3, np.float16)
    one, two = (gpu_views((Tensor(array),), ("q",), None)[0] for _ in range(2))
    assert one is not two
    assert gpu_views((Interface(array),), ("q",), None) == ("adopted",)


def test_what_the_quick_way_is_not_for(ordered, monkeypatch):
    asked = []
    monkeypatch.setattr(foreign_views, "adopt", lambda value, name, _: asked.append(name))
    array = np.zeros((2, 3), np.float16)
    learning, negative = Tensor(array), Tensor(array)
    learning.requires_grad = True
    negative.is_neg = lambda: True
    given = {
        "learning": learning, "negative": negative,
        "empty": Tensor(array[:0]),
        "complex": Tensor(np.zeros(3, np.float64)),
        "masked": Interface(array, mask=Interface(array)),
        "read-only": Interface(array, data=(array.ctypes.data, True)),
        "empty interface": Interface(array[:0], data=(0, False)),
        "backwards": Interface(array[::-1]),
    }  # fmt: skip
    gpu_views(tuple(given.values()), tuple(given), None)
    assert asked == list(given)


def test_a_tensor_that_the_interface_refuses_is_asked_the_slow_way(ordered, monkeypatch):
    def refuse(value, out):
        raise BufferError("it is sparse")

    asked = []
    tensor = Tensor(np.zeros((7, 3), np.float16))
    gpu_views((Tensor(np.zeros(3, np.float16)),), ("q",), None)
    exchange = foreign_views._looks[Tensor].__self__
    monkeypatch.setattr(exchange, "_look", refuse)
    monkeypatch.setattr(foreign_views, "adopt", lambda value, name, _: asked.append(name))
    gpu_views((tensor,), ("q",), None)
    assert asked == ["q"]


def test_a_library_that_does_not_say_its_stream_is_asked_the_slow_way(ordered, monkeypatch):
    def unknown(self, ordinal):
        raise LookupError

    asked = []
    monkeypatch.setattr(foreign_views._Exchange, "working_on", unknown)
    monkeypatch.setattr(foreign_views, "adopt", lambda value, name, _: asked.append(name))
    gpu_views([Tensor(np.zeros(3, np.float16))] * 2, ("q", "k"), None)
    assert asked == ["q", "k"]


def test_arrays_on_the_host_are_left_alone(ordered):
    array = np.zeros(3, np.float16)
    assert gpu_views((array, None, 1.0, "text", Tensor(array, device=1)), "abcde", None) is None
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(array.ctypes.data, 6, array, 0), 0)
    assert gpu_views((cupy.ndarray((3,), np.float16, memory),), "a", None) is None
