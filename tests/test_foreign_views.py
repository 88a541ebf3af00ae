"""The quick way of foreign GPU arrays into a warm call, with libraries that are stand-ins."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from foreign_arrays import Interface, Jax, NumbaArray, Tensor

from cupyflash.runtime import (
    foreign_interface,
    foreign_jax,
    foreign_numba,
    foreign_torch,
    foreign_views,
    kept_views,
)
from cupyflash.runtime.foreign import Consumer
from cupyflash.runtime.foreign_views import gpu_views

cupy = pytest.importorskip("cupy")  # its arrays; nothing of them is read
ALL = (foreign_interface, foreign_jax, foreign_torch, foreign_views)


@pytest.fixture
def ordered(monkeypatch):
    """What was ordered: (producer, consumer) streams."""
    found = []
    stream = SimpleNamespace(handle=5, captured=False)
    device = SimpleNamespace(
        order=lambda first, then: found.append((first, then)),
        is_capturing=lambda handle: stream.captured,
    )
    monkeypatch.setattr(Consumer, "queue", lambda self, ordinal: (device, stream.handle))
    for module in ALL:
        if hasattr(module, "one_gpu"):
            monkeypatch.setattr(module, "one_gpu", lambda: True)
    kept_views.views.clear()
    monkeypatch.setattr(foreign_views, "_looks", {})
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: 77))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return SimpleNamespace(orders=found, stream=stream, torch=torch)


@pytest.fixture
def adopted(monkeypatch):
    """What was adopted, by name; views of arrays that say where their memory is."""
    found = []

    def adopt(value, name, consumer):
        found.append(name)
        array = value.array
        memory = cupy.cuda.UnownedMemory(array.ctypes.data, max(1, array.nbytes), array, 0)
        start = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(array.shape, array.dtype, start, array.strides)

    for module in ALL:
        if hasattr(module, "adopt"):
            monkeypatch.setattr(module, "adopt", adopt)
    return found


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
@pytest.mark.parametrize("kind", [Tensor, Interface, NumbaArray, Jax])
def test_a_view_is_the_array_and_is_made_once(array, kind, ordered, adopted):
    given = kind(array)
    (found,) = gpu_views((given,), ("q",), None)
    assert isinstance(found, cupy.ndarray)
    assert (found.shape, found.dtype, found.strides) == (array.shape, array.dtype, array.strides)
    assert found.data.ptr == array.ctypes.data
    for again in (given, kind(array)):  # known, and alike
        assert gpu_views((None, 1.0, again), ("a", "b", "q"), None)[2] is found
    assert adopted == (["q"] if kind in (Tensor, Jax) else [])


@pytest.mark.parametrize("kind", [Tensor, Jax])
def test_bfloat16(kind, ordered, adopted):
    array = np.zeros((3, 8), ml_dtypes.bfloat16)
    assert gpu_views((kind(array),), ("q",), None)[0].dtype == array.dtype


@pytest.mark.parametrize("kind", [Tensor, Interface, NumbaArray, Jax])
def test_the_same_address_with_another_shape_is_another_view(kind, ordered, adopted):
    array = np.zeros((4, 8), np.float16)
    shapes = [gpu_views((kind(a),), ("q",), None)[0].shape for a in (array, array[:2])]
    assert shapes == [(4, 8), (2, 8)]


def test_a_tensor_that_changed_is_looked_at_again(ordered, adopted):
    tensor = Tensor(np.zeros((4, 4), np.float16))
    gpu_views((tensor,), ("q",), None)
    for changed in (np.zeros((4, 4), np.float16), tensor.array[:2], tensor.array.T):
        tensor.array = changed
        (found,) = gpu_views((tensor,), ("q",), None)
        assert (found.data.ptr, found.shape) == (changed.ctypes.data, changed.shape)
        assert found.strides == changed.strides


def test_a_device_array_of_numba_that_changed_is_looked_at_again(ordered):
    given = NumbaArray(np.zeros((4, 4), np.float16))
    first = gpu_views((given,), ("q",), None)[0]
    given.asked = 0
    assert gpu_views((given,), ("q",), None)[0] is first
    assert given.asked == 0
    given.array = np.zeros((4, 4), np.float16)
    given.gpu_data = object()
    assert gpu_views((given,), ("q",), None)[0].data.ptr == given.array.ctypes.data
    assert given.asked == 1


@pytest.mark.parametrize("kind", [NumbaArray, Jax])
def test_an_array_is_not_taken_for_one_that_is_gone(kind, ordered, adopted):
    """Objects come to lie where others were; so does a new one of another shape here."""
    seen = foreign_numba._seen if kind is NumbaArray else foreign_jax._ready
    array = np.zeros((4, 4), np.float16)
    given = kind(array)
    gpu_views((given,), ("q",), None)
    entry = seen.pop(id(given))
    del given
    gc.collect()
    other = kind(array[:2])
    seen[id(other)] = entry
    assert gpu_views((other,), ("q",), None)[0].shape == (2, 4)


def test_other_streams_are_ordered_once_a_call(ordered, adopted):
    given = [Tensor(np.zeros(n, np.float16)) for n in (3, 4)]
    given += [Interface(np.zeros(n, np.float16), stream) for n, stream in ((3, 9), (4, 9), (5, 1))]
    given += [NumbaArray(np.zeros(3, np.float16), stream) for stream in (8, 0, 8)]
    for _ in range(2):
        gpu_views(given, "abcdefgh", None)
        assert ordered.orders == [(77, 5), (9, 5), (1, 5), (8, 5)]
        ordered.orders.clear()
    ordered.stream.handle = 77
    gpu_views(given[:2], "ab", None)
    assert ordered.orders == []
    ordered.stream.handle, ordered.stream.captured = 5, True
    gpu_views(given, "abcdefgh", None)
    assert ordered.orders == []


def test_the_stream_of_torch_by_its_public_interface(ordered, adopted):
    del ordered.torch._C
    ordered.torch.cuda = SimpleNamespace(current_stream=lambda n: SimpleNamespace(cuda_stream=66))
    tensor = Tensor(np.zeros(3, np.float16))
    gpu_views((tensor,), "a", None)
    assert ordered.orders == [(66, 5)]


def test_with_more_gpus_an_address_alone_says_nothing(ordered, adopted, monkeypatch):
    """Memory of one may come back on another; a view says which it is on."""
    where = SimpleNamespace(ordinal=0)
    for module in ALL:
        if hasattr(module, "one_gpu"):
            monkeypatch.setattr(module, "one_gpu", lambda: False)
    monkeypatch.setattr(foreign_interface, "device_of", lambda address: where.ordinal)
    monkeypatch.setattr(Tensor, "get_device", lambda self: where.ordinal)
    array = np.zeros(3, np.float16)
    for kind in (Tensor, Interface, NumbaArray):
        found = []
        for where.ordinal in (0, 1, 0, 0):
            (view,) = gpu_views((kind(array),), ("q",), None)
            found.append((view.data.device_id, id(view)))
        assert [ordinal for ordinal, _ in found] == [0, 1, 0, 0]
        assert found[0] == found[2] == found[3]
    adopted.clear()
    for _ in range(2):  # JAX's pointers do not say either; the array itself is known again
        gpu_views((Jax(array),), ("q",), None)
    known = Jax(array)
    for _ in range(2):
        gpu_views((known,), ("known",), None)
    assert adopted == ["q", "q", "known"]


def test_what_the_quick_way_is_not_for(ordered, adopted):
    array = np.zeros((2, 3), np.float16)
    gpu_views((Tensor(array), Jax(array)), ("q", "k"), None)
    adopted.clear()
    learning, negative = Tensor(array), Tensor(array)
    learning.requires_grad = True
    negative.is_neg = lambda: True
    no_memory = Tensor(array)

    def data_ptr():
        raise RuntimeError("a tensor that does not have storage")

    no_memory.data_ptr = data_ptr
    given = {
        "learning": learning, "negative": negative, "no_memory": no_memory,
        "empty": Tensor(array[:0]),
        "complex": Interface(np.zeros(3, np.complex64)),
        "masked": Interface(array, mask=Interface(array)),
        "read-only": Interface(array, data=(array.ctypes.data, True)),
        "empty interface": Interface(array[:0], data=(0, False)),
        "backwards": Interface(array[::-1]),
        "out": Jax(array), "workspace": Jax(array), "key_cache": Jax(array),
    }  # fmt: skip
    gpu_views(tuple(given.values()), tuple(given), None)
    assert adopted == list(given)
    deleted = Jax(array)
    deleted.deleted = True
    with pytest.raises(ValueError, match="q was deleted or donated"):
        gpu_views((deleted,), ("q",), None)


def test_a_tensor_is_asked_for_its_sign_where_it_can_have_one(ordered, adopted):
    """The imaginary part of a conjugate is float16 or float32, and the bits of its negative."""
    tensors, asked, kept = foreign_torch.Tensors(), [], []
    for dtype in (np.float16, ml_dtypes.bfloat16, np.int32):
        tensor = Tensor(np.zeros(3, dtype))
        tensor.is_neg = lambda dtype=dtype: asked.append(dtype) is not None
        kept.append(tensor)
        for _ in range(3):
            tensors.view(tensor, "q", Consumer())
    assert asked == [np.float16] * 3 + [ml_dtypes.bfloat16, np.int32]


def test_jax_lets_the_stream_wait_for_what_it_still_computes(ordered, adopted):
    array = np.zeros((3, 4), np.float16)
    late = Jax(array, ready=False)
    for _ in range(3):
        gpu_views((Jax(array), late), ("q", "k"), None)
    assert late.told == [5] * 3
    ordered.stream.captured = True
    gpu_views((late,), ("k",), None)
    late.ready = True
    gpu_views((late,), ("k",), None)
    assert late.told == [5] * 3
    asked = late.asked
    gpu_views((late,), ("k",), None)
    assert late.asked == asked  # ready once, ready for ever


def test_an_array_of_jax_is_known_by_all_that_makes_it(ordered, adopted):
    array = np.zeros((4, 4), np.float16)
    given = [Jax(array), Jax(array, "{1}"), Jax(array[:2]), Jax(array.view(np.int16)[:, :2])]
    found = [gpu_views((a,), ("q",), None)[0] for a in given]
    assert adopted == ["q"] * 4
    assert len(set(map(id, found))) == 4


def test_a_type_whose_first_array_has_no_interface(ordered):
    class Sometimes(Interface):
        where = "cpu"

        @property
        def __cuda_array_interface__(self):
            if self.where == "cpu":
                raise AttributeError("not on a GPU")
            return self.found

        @__cuda_array_interface__.setter
        def __cuda_array_interface__(self, found):
            self.found = found

    array = np.zeros(3, np.float16)
    with pytest.raises(TypeError, match="q is Sometimes"):
        gpu_views((Sometimes(array),), ("q",), None)
    given = Sometimes(array)
    given.where = "gpu"
    assert gpu_views((given,), ("q",), None)[0].data.ptr == array.ctypes.data


def test_arrays_on_the_host_are_left_alone(ordered, adopted):
    array = np.zeros(3, np.float16)
    host = (array, None, 1.0, "text", Tensor(array, device=1), Jax(array, device=1))
    assert gpu_views(host, "abcdef", None) is None
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(array.ctypes.data, 6, array, 0), 0)
    assert gpu_views((cupy.ndarray((3,), np.float16, memory),), "a", None) is None
    assert adopted == []
