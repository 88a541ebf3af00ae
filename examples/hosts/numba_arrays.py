"""Attention between Numba's CUDA kernels: arrays by the array interface, one stream for all."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
from numba import cuda

from cupyflash import flash_attn_varlen_func

TOKENS, HEADS, DIM = 48, 4, 64


@cuda.jit
def double(array: np.ndarray) -> None:
    i = cuda.grid(1)
    if i < array.size:
        array[i] *= 2


def attend(dtype: type, numba_dtype: type) -> float:
    """Error of attention; the queries are doubled by a kernel of Numba's on the same stream.

    Numba has no bfloat16 arrays: its bits travel as uint16, and CuPy sees them as what they are.
    """
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((TOKENS, HEADS, DIM)).astype(dtype) for _ in "qkv"]
    stream = cuda.stream()
    q, k, v = (cuda.to_device(a.view(numba_dtype), stream=stream) for a in host)
    starts = cuda.to_device(np.array([0, TOKENS], np.int32), stream=stream)
    out = cuda.device_array(host[0].shape, numba_dtype, stream=stream)
    arrays = [q, k, v, out]
    scale = 1
    if numba_dtype == dtype:
        double[-(-q.size // 128), 128, stream](q.reshape(-1))
        scale = 2
    else:
        import cupy as cp

        arrays = [cp.asarray(a).view(dtype) for a in arrays]
    flash_attn_varlen_func(
        *arrays[:3], TOKENS, starts, TOKENS, starts, out=arrays[3], stream=stream
    )
    found = out.copy_to_host(stream=stream)
    stream.synchronize()
    q32, k32, v32 = (a.astype(np.float32) for a in host)
    scores = np.einsum("ihd,jhd->hij", scale * q32, k32) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    right = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v32)
    return float(np.abs(found.view(dtype).astype(np.float32) - right).max())


def main() -> float:
    errors = {
        "float16": attend(np.float16, np.float16),
        "bfloat16": attend(ml_dtypes.bfloat16, np.uint16),
    }
    print("Numba:", ", ".join(f"{name} error {error:.4f}" for name, error in errors.items()))
    return max(errors.values())


if __name__ == "__main__":
    if not cuda.is_available():
        sys.exit("Numba finds no GPU")
    assert main() < 0.03
