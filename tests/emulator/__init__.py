"""Runs kernels from the PTX that NVRTC emits, on the CPU, and checks them while they run."""

from .device import EmulatedDevice, device_array, emulated
from .loader import LoadedModule, Program
from .ptx import PtxError
from .report import EmulatorError, Report

__all__ = [
    "EmulatedDevice",
    "EmulatorError",
    "LoadedModule",
    "Program",
    "PtxError",
    "Report",
    "device_array",
    "emulated",
]
