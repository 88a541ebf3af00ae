"""What the benchmark's cases run on a device, known without running them."""

from __future__ import annotations

from collections.abc import Iterable

from cupyflash.runtime.device import DeviceInfo, use_device
from cupyflash.runtime.dry_device import DryDevice
from cupyflash.runtime.variant import Variant
from cupyflash.runtime.workspace import free_workspaces

from .case import BenchCase
from .inputs import DryInputs
from .providers import cupyflash

__all__ = ["needed_kernels"]


def needed_kernels(cases: Iterable[BenchCase], info: DeviceInfo) -> list[Variant]:
    """The kernels of cupyflash's calls, each once; none of a case that is refused there."""
    found: dict[Variant, None] = {}
    for case in cases:
        device = DryDevice(info)
        try:
            with use_device(device):
                cupyflash(DryInputs(case))()
        except NotImplementedError:
            continue  # the run says why
        finally:
            free_workspaces()
        found.update(dict.fromkeys(device.kernels))
    return list(found)
