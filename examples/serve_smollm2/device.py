"""Where the model runs: CuPy on a GPU, else NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.backends import get_attn_backend

from .config import Config

__all__ = ["capability_of", "choose_device"]


def choose_device(asked: str, config: Config) -> tuple[Any, str]:
    """The array module and a line that names the device.

    Parameters
    ----------
    asked : {"auto", "cpu", "gpu"}
    config : Config

    Raises
    ------
    RuntimeError
        "gpu" was asked for and cannot be had; says why.
    """
    reason = "as asked" if asked == "cpu" else _why_no_gpu(config)
    if not reason:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        return cupy, f"{name} (CuPy, float16)"
    if asked == "gpu":
        raise RuntimeError(f"no GPU to run on: {reason}; use --device cpu")
    return np, f"the CPU (NumPy, float32; {reason})"


def capability_of(xp: Any) -> tuple[int, int] | None:
    """Compute capability of the current GPU; None for NumPy."""
    if xp is np:
        return None
    digits = xp.cuda.Device().compute_capability
    return int(digits[:-1]), int(digits[-1])


def _why_no_gpu(config: Config) -> str:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    if not cupy.is_available():
        return "CuPy finds no CUDA device"
    try:
        get_attn_backend(config.asked_of_attention(np.float16), capability_of(cupy))
    except ValueError as refusal:
        return str(refusal)
    return ""
