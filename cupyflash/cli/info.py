"""``info``: what is installed, which GPU there is, and which kernels a call would get."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from typing import Any

import numpy as np

import cupyflash
from cupyflash.bench.record import driver_version, kernels_digest
from cupyflash.fa_version import current_capability, resolve_need
from cupyflash.runtime import env
from cupyflash.runtime.cubin_cache import cubin_cache
from cupyflash.runtime.cupy_import import load_cupy
from cupyflash.runtime.dtypes import BF16, E4M3
from cupyflash.runtime.errors import CompileError
from cupyflash.runtime.kernel_source import kernel_root
from cupyflash.runtime.nvrtc import compiler
from cupyflash.support import Need, unsupported_reason, versions

from .terminal import print_pairs, print_table

__all__ = ["add", "found_here", "run"]

_NEEDS = {
    "bf16": Need(128, 128),
    "bf16, ALiBi": Need(128, 128, alibi=True),
    "bf16, sinks": Need(128, 128, sink=True),
    "bf16, head size 256": Need(256, 256),
    "bf16 over an e4m3 cache": Need(128, 128, BF16, E4M3),
    "e4m3": Need(128, 128, E4M3, E4M3),
}


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("info", help="GPU, CuPy, NVRTC, kernels chosen and why, cache")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is here; nothing is compiled or launched."""
    found = found_here()
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print_pairs(
        (name, _text(value)) for name, value in found.items() if name not in ("gpus", "versions")
    )
    for gpu in found["gpus"]:
        print()
        print_pairs((name, _text(value)) for name, value in gpu.items())
    if found["versions"]:
        print()
        rows = [
            [name, str(row["version"] or "-"), "; ".join(row["not"].values())]
            for name, row in found["versions"].items()
        ]
        print_table(["kernels for", "version", "why not the other"], rows)
    return 0


def found_here() -> dict[str, Any]:
    """All that `run` prints, as plain values."""
    cache = cubin_cache()
    capability, without = current_capability()
    files = cache.files()
    return {
        "cupyflash": cupyflash.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": importlib.import_module("ml_dtypes").__version__,
        "cupy": _cupy_version(),
        "nvrtc": _nvrtc(),
        "driver": driver_version() if capability else "-",
        "runs on": "GPU and NumPy arrays" if capability else f"NumPy arrays only: {without}",
        "kernels_cu": f"{kernel_root()} ({kernels_digest(kernel_root())})",
        "cache": f"{cache.folder}: {len(files)} kernels, "
        f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB",
        "settings": env.settings(),
        "gpus": _gpus() if capability else [],
        "versions": {name: _chosen(need, capability) for name, need in _NEEDS.items()}
        if capability
        else {},
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={text}" for name, text in value.items()) or "none"
    return str(value)


def _cupy_version() -> str:
    try:
        return str(load_cupy().__version__)
    except ImportError:
        return "not installed: pip install 'cupyflash[cuda13]' or [cuda12]"
    except CompileError as error:
        return str(error)


def _nvrtc() -> str:
    try:
        found = compiler()
    except CompileError as error:
        return str(error)
    archs = ", ".join(f"{arch // 10}.{arch % 10}" for arch in found.archs)
    return f"{found.version[0]}.{found.version[1]}, compiles for {archs}"


def _gpus() -> list[dict[str, Any]]:
    from cupyflash.runtime.cupy_device import cupy_device

    cp = load_cupy()
    found = []
    for ordinal in range(cp.cuda.runtime.getDeviceCount()):
        info = cupy_device(ordinal).info
        free, total = _memory(cp, ordinal)
        found.append(
            {
                "gpu": f"{ordinal}: {info.name}",
                "capability": ".".join(map(str, info.capability)),
                "multiprocessors": info.num_sms,
                "shared memory": f"{info.smem_optin >> 10} KiB a block",
                "L2": f"{info.l2_bytes >> 20} MiB",
                "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            }
        )
    return found


def _memory(cp: Any, ordinal: int) -> tuple[int, int]:
    with cp.cuda.Device(ordinal):
        free, total = cp.cuda.runtime.memGetInfo()
    return int(free), int(total)


def _chosen(need: Need, capability: tuple[int, int]) -> dict[str, Any]:
    try:
        version = resolve_need(need, capability)
    except NotImplementedError:
        version = None
    reasons = {str(v): unsupported_reason(v, need, capability) for v in versions()}
    return {"version": version, "not": {v: f"{v}: {why}" for v, why in reasons.items() if why}}
