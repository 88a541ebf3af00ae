"""What the driver is given, by ctypes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from cupyflash.runtime.cupy_device import CuPyDevice, LoadedKernel
from cupyflash.runtime.params import KernelArgs
from cupyflash.runtime.plan import Plan
from cupyflash.runtime.variant import Variant


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "smem")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


def cupy_device(launch):
    device = object.__new__(CuPyDevice)
    device.ordinal, device._alone, device._launch = 0, True, launch
    device._current_stream = lambda: SimpleNamespace(ptr=0x7F0123456789)
    device._context = SimpleNamespace(use=lambda: None)
    device._runtime = SimpleNamespace(free=lambda pointer: None)
    error = type("CUDADriverError", (RuntimeError,), {})
    device._cp = SimpleNamespace(
        cuda=SimpleNamespace(driver=SimpleNamespace(CUDADriverError=error))
    )
    return device


PLAN = Plan(Variant("a.cu", "a", "sm_90", ()), (3, 2, 1), (128, 4, 1), 50000)


@pytest.mark.parametrize("values", [(b"\0one",), (b"first", bytes(range(128)), b"\0" * 7)])
@pytest.mark.parametrize("programmatic", [False, True])
def test_what_the_driver_is_given(values, programmatic):
    taken = []

    def launch(config, function, pointers, extra):
        found = LaunchConfig.from_buffer_copy(config)
        places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        taken.append([ctypes.string_at(places[i], len(value)) for i, value in enumerate(values)])
        shape = found.gx, found.gy, found.gz, found.bx, found.by, found.bz, found.smem
        assert shape == (3, 2, 1, 128, 4, 1, 50000)
        assert found.stream == (9 if len(taken) > 1 else 0x7F0123456789)
        assert function.value == 0x7FFF00001234
        assert found.count == programmatic
        attribute = (ctypes.c_int * 18).from_address(found.attributes)
        assert list(attribute) == [6, 0, 1] + [0] * 15
        assert extra is None
        return 0

    device = cupy_device(launch)
    plan = Plan(PLAN.variant, PLAN.grid, PLAN.block, PLAN.smem_bytes, programmatic=programmatic)
    kernel = LoadedKernel(SimpleNamespace(ptr=0x7FFF00001234))
    device.launch(kernel, plan, KernelArgs(values), None)
    device.launch(kernel, plan, KernelArgs(values), 9)
    again = device.ready(kernel, plan, KernelArgs(values), 9)
    del kernel
    assert [again(), again()] == [0, 0]
    assert taken == [list(values)] * 4


def test_a_ready_launch_is_of_its_device_alone():
    taken = []
    device = cupy_device(lambda *args: taken.append(args) or 0)
    device._alone, device.ordinal, current = False, 1, [0]
    device._runtime.getDevice = lambda: current[0]
    again = device.ready(LoadedKernel(SimpleNamespace(ptr=1)), PLAN, KernelArgs((b"x",)), 0)
    assert again() == 201
    assert not taken
    current[0] = 1
    assert again() == 0
    assert len(taken) == 1


def test_a_thread_without_a_context_gets_one_and_other_errors_are_raised():
    statuses = [201, 0, 201, 201, 700]
    device = cupy_device(lambda *args: statuses.pop(0))
    kernel, args = LoadedKernel(SimpleNamespace(ptr=1)), KernelArgs((b"x",))
    device.launch(kernel, PLAN, args, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            device.launch(kernel, PLAN, args, 0)
    assert not statuses
