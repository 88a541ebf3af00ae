"""The device seam over NumPy arrays: the library's public functions run on the emulator."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .compile import compile_ptx
from .loader import LoadedModule, Program
from .machine import launch
from .report import Report
from .tensor_map import encode_tiled

__all__ = ["EmulatedDevice", "device_array", "emulated"]

GUARD = 256
SMEM_OPTIN = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}


def device_array(
    shape: int | Sequence[int], dtype: Any = np.uint8, fill: Any = None, align: int = 256
) -> np.ndarray:
    """An array between red zones, filled with 0xFF bytes (NaN in every float format) or ``fill``.

    The red zones are at least 256 bytes, so that an overrun cannot land in another array.
    """
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.full(nbytes + 2 * GUARD + align, 0xFF, np.uint8)
    start = GUARD + -(raw.ctypes.data + GUARD) % align
    array = raw[start : start + nbytes].view(dtype).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array


class EmulatedDevice:
    """A GPU that is a program: implements ``cupyflash.runtime.device.Device``.

    Parameters
    ----------
    arch : str
        ``"sm_80"``, ``"sm_90a"``, ...
    num_sms : int
        What the library plans for; also the number of CTAs that run at once (at least two).
    seed : int
        0: warps in a fixed order, copies as late as possible. Else each launch has its own random
        order, drawn from the seed.
    check : bool
        Whether races are looked for.
    """

    def __init__(
        self,
        arch: str = "sm_80",
        num_sms: int = 4,
        seed: int = 0,
        check: bool = True,
        smem_optin: int | None = None,
        keep_reports: int = 64,
        max_idle: int = 50_000_000,
    ) -> None:
        m = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", arch)
        if not m:
            raise ValueError(f"arch={arch!r}; say sm_80, sm_90a, ...")
        self.arch, self.num_sms, self.seed, self.check = arch, num_sms, seed, check
        self.capability = (int(m[1]), int(m[2]))
        self.smem_optin = smem_optin or SMEM_OPTIN.get(self.capability, 99 << 10)
        self.max_idle = max_idle
        self.reports: list[Report] = []
        self.launches = 0
        self._keep = keep_reports
        self._lock = threading.Lock()
        self.kernels: dict[Any, Program] = {}
        self.sources: set[str] = set()  # files of the library whose kernels were launched

    # ---- the seam
    @property
    def info(self) -> Any:
        from cupyflash.runtime.device import DeviceInfo

        name = f"emulated {self.arch}"
        return DeviceInfo(name, 0, self.capability, self.num_sms, self.smem_optin, 50 << 20)

    def compile(self, variant: Any) -> Program:
        """A program from ``kernel_source(variant)``."""
        from cupyflash.runtime.compile import kernel_source

        with self._lock:
            if variant not in self.kernels:
                source, options = kernel_source(variant)
                module = self.compile_source(source, options, variant.source)
                self.kernels[variant] = module.program(variant.symbol)
                self.kernels[variant].source = variant.source
            return self.kernels[variant]

    def launch(self, kernel: Program, plan: Any, args: Any, stream: int | None = None) -> None:
        arrays = [a for a in args.arrays if isinstance(a, np.ndarray)]
        if kernel.source:
            self.sources.add(kernel.source)
        self.run(kernel, plan.grid, plan.block, plan.smem_bytes, args.values, arrays)

    def encode_tensor_map(
        self,
        array: Any,
        element_type: int,
        pointer: int,
        shape: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
        l2_promotion: int,
        oob_fill: int,
    ) -> np.ndarray:
        return encode_tiled(
            element_type,
            pointer,
            shape,
            strides_bytes,
            box,
            swizzle=swizzle,
            l2_promotion=l2_promotion,
            oob_fill=oob_fill,
        )

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int | None = None) -> np.ndarray:
        """An array of 0xFF bytes between red zones."""
        return device_array(shape, dtype)

    def pointer(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)

    def is_capturing(self, stream: int | None = None) -> bool:
        return False

    def beside(self, stream: int) -> int:
        return stream + 1

    def order(self, first: int, then: int) -> None:
        """Launches run as they are queued."""

    def current_stream(self) -> int:
        return 0

    # ---- without a plan
    def compile_source(
        self,
        source: str,
        options: Sequence[str] = (),
        name: str = "kernel.cu",
        headers: dict[str, str] | None = None,
    ) -> LoadedModule:
        """Kernels from CUDA source, for the device's architecture unless ``options`` name one."""
        options = [re.sub(r"(arch[ufitecr]*=)sm_", r"\1compute_", o) for o in options]
        if not any("arch" in o for o in options):
            options.append(f"--gpu-architecture={self.arch.replace('sm_', 'compute_')}")
        if not any("std=" in o for o in options):
            options.append("--std=c++17")
        drop = ("--ptxas-options", "-lineinfo", "--generate-line-info", "-Xptxas")
        options = [o for o in options if not o.startswith(drop)]
        ptx, _ = compile_ptx(source, options, name.rsplit("/", 1)[-1], headers)
        return LoadedModule(ptx)

    def run(
        self,
        program: Program,
        grid: Sequence[int],
        block: Sequence[int],
        smem_bytes: int,
        args: Sequence[Any],
        arrays: Sequence[np.ndarray],
        *,
        seed: int | None = None,
        **options: Any,
    ) -> Report:
        """One launch; ``args`` are by-value parameters, ``arrays`` the memory it may touch."""
        with self._lock:
            self.launches += 1
            number = self.launches
        if seed is None:
            seed = self.seed * 1_000_003 + number if self.seed else 0
        options = {"check": self.check, "max_idle": self.max_idle, **options}
        options.setdefault("resident", max(2, self.num_sms))
        options.setdefault("smem_limit", self.smem_optin)
        report = launch(program, grid, block, smem_bytes, args, arrays, seed=seed, **options)
        with self._lock:
            self.reports = [*self.reports[-self._keep + 1 :], report]
        return report

    def synchronize(self) -> None:
        """Launches are complete when they return."""


_shared: dict[str, dict[Any, Program]] = {}


@contextmanager
def emulated(
    arch: str = "sm_80", num_sms: int = 4, seed: int = 0, **options: Any
) -> Iterator[EmulatedDevice]:
    """Runs the library's public functions on the emulator, on NumPy arrays.

    Programs are kept between uses of one architecture.
    """
    from cupyflash.runtime.device import use_device
    from cupyflash.runtime.workspace import _scratch

    device = EmulatedDevice(arch, num_sms, seed, **options)
    device.kernels = _shared.setdefault(arch, {})
    try:
        with use_device(device):
            yield device
    finally:  # what the library keeps for a device it has seen: 3 MB of each, for ever
        for key in list(_scratch):
            if key[0] is device:
                _scratch.pop(key, None)
