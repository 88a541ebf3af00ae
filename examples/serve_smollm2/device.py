"""Where the model runs: CuPy on a GPU, else NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyflash

from .config import Config

__all__ = ["choose_device"]


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


def _why_no_gpu(config: Config) -> str:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    if not cupy.is_available():
        return "CuPy finds no CUDA device"
    q = cupy.zeros((1, config.heads, config.head_dim), np.float16)
    cache = cupy.zeros((1, 16, config.kv_heads, config.head_dim), np.float16)
    starts, lengths = cupy.array([0, 1], np.int32), cupy.array([1], np.int32)
    table = cupy.zeros((1, 1), np.int32)
    try:  # one tiny call, because a release may lack the kernels for this GPU
        cupyflash.flash_attn_varlen_func(
            q, cache, cache, 1, starts, 1, seqused_k=lengths, block_table=table, causal=True
        )
    except NotImplementedError as refusal:
        return str(refusal)
    return ""
