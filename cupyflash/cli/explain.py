"""``explain``: which kernels a call gets, how they are launched, and what it must cost."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import cupyflash
from cupyflash.runtime.device import DeviceInfo, use_device

from .call_options import GPUS, add_call_options, call_arguments, gpu_of
from .recorded_call import record
from .terminal import CommandError

__all__ = ["add", "run"]


class _Planned:
    """A device that only its properties are asked of: `explain` launches nothing."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.kernels: dict[Any, Any] = {}


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("explain", help="kernels, launches and floor of a call")
    add_call_options(parser)
    parser.add_argument(
        "--gpu", choices=("here", "none", *GPUS),
        help="here = the current GPU; none = NumPy arrays; the current one or an H200 if left out",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what `cupyflash.explain` finds; nothing is launched and no GPU is needed."""
    info = gpu_of(options.gpu)
    arguments = call_arguments(options)
    with nullcontext() if info is None else use_device(_Planned(info)):  # type: ignore[arg-type]
        try:
            found = cupyflash.explain(**arguments)
        except TypeError as error:  # a type that cannot be
            raise CommandError(str(error)) from error
    if info is None:
        print(found)
        return 0
    plans = tuple(launch.plan for launch in record(info, arguments).launches)
    nbytes = max((plan.workspace_bytes for plan in plans), default=0)
    print(replace(found, plans=plans, workspace_bytes=nbytes))
    kernels = len({plan.variant for plan in found.plans})
    print(
        f"bounds       other calls within them may take {kernels} kernels and "
        f"{found.workspace_bytes} bytes of workspace"
    )
    return 0
