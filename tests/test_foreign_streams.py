"""Arrays of other libraries on a GPU: what their streams are told and ordered to wait for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cupyflash.runtime import cupy_device as devices
from cupyflash.runtime import foreign
from cupyflash.runtime.foreign import Consumer, adopt


class Gpu:
    """A device whose streams only say what was asked of them; and CuPy, as far as it is used."""

    def __init__(self, capturing=()):
        self.capturing, self.ordered, self.taken, self.looked = capturing, [], [], 0

    def current_stream(self):
        self.looked += 1
        return 0

    def is_capturing(self, stream):
        return stream in self.capturing

    def order(self, first, then):
        self.ordered.append((first, then))

    def from_dlpack(self, exported):
        kind, ordinal = exported.__dlpack_device__()
        self.taken.append((kind, ordinal, exported.__dlpack__(stream=1, max_version=(1, 0))))
        return "array"

    def empty(self, shape, dtype):
        self.taken.append((shape, dtype))
        return "empty"

    def asarray(self, exported):
        self.taken.append(exported.__cuda_array_interface__)
        return SimpleNamespace(data=SimpleNamespace(device_id=0))


@pytest.fixture
def device(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(foreign, "load_cupy", lambda: gpu)
    monkeypatch.setattr(devices, "cupy_device", lambda ordinal: gpu)
    return gpu


class OnGpu:
    """Exports the stream that it was told instead of a capsule."""

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, *, stream):
        return stream


STREAMS = [(None, 1), (0, 1), (77, 77), (SimpleNamespace(ptr=5), 5)]


@pytest.mark.parametrize(("stream", "told"), STREAMS)
def test_an_exporter_is_told_the_stream_of_the_call(device, stream, told):
    assert adopt(OnGpu(), "q", Consumer(stream)) == "array"
    assert device.taken == [(2, 1, told)]


@pytest.mark.parametrize(("library", "told"), [("torch", -1), ("jaxlib._jax", None)])
def test_nothing_is_ordered_while_the_stream_is_captured(device, library, told):
    device.capturing = (77,)
    exporter = type("Array", (OnGpu,), {"__module__": library})()
    adopt(exporter, "q", Consumer(77))
    assert device.taken == [(2, 1, told)]
    adopt(interface_of(5), "q", Consumer(77))
    assert device.ordered == []


def interface_of(stream, read_only=False):
    interface = {"shape": (2,), "typestr": "<f2", "data": (256, read_only), "stream": stream}
    return SimpleNamespace(__cuda_array_interface__={**interface, "version": 3})


@pytest.mark.parametrize(
    ("theirs", "ours", "ordered"),
    [(None, 77, []), (77, 77, []), (1, None, []), (5, 77, [(5, 77)]), (5, None, [(5, 1)])],
)
def test_streams_of_the_array_interface_are_ordered_on_the_device(device, theirs, ours, ordered):
    adopt(interface_of(theirs), "q", Consumer(ours))
    assert device.ordered == ordered
    assert device.taken[0]["stream"] is None  # CuPy would wait for it on the host
    assert device.taken[0]["data"] == (256, False)


def test_an_interface_without_elements_has_no_address(device):
    interface = {"shape": (0, 4), "typestr": "<f2", "data": (0, False), "version": 3}
    assert adopt(SimpleNamespace(__cuda_array_interface__=interface), "q", Consumer()) == "empty"
    assert device.taken == [((0, 4), "<f2")]


def test_memory_that_is_read_only_is_read_and_not_written(device):
    adopt(interface_of(None, read_only=True), "q", Consumer())
    with pytest.raises(ValueError, match=r"out is written.*read-only"):
        adopt(interface_of(None, read_only=True), "out", Consumer())


def test_the_stream_is_looked_up_once_a_call(device):
    consumer = Consumer()
    for _ in range(3):
        adopt(OnGpu(), "q", consumer)
    assert (device.looked, len(device.taken)) == (1, 3)


def test_a_library_that_refuses_is_quoted(device):
    class NeedsGradient(OnGpu):
        def __dlpack__(self, *, stream):
            raise BufferError("Can't export tensors that require gradient")

    with pytest.raises(TypeError, match=r"k \(NeedsGradient, \?\).*require gradient"):
        adopt(NeedsGradient(), "k", Consumer())
