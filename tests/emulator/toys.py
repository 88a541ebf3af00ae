"""The test kernels of ``kernels/``: how to load one, launch it and judge its output."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from .device import EmulatedDevice, device_array
from .loader import Program
from .report import Report
from .tensor_map import encode_tiled

__all__ = ["HEAD_DIM", "attend", "attention_case", "load", "pointer"]

KERNELS = Path(__file__).resolve().parent / "kernels"
HEAD_DIM = 64
BF16 = np.dtype(ml_dtypes.bfloat16)


@functools.cache
def load(file: str, arch: str, symbol: str, defines: tuple[str, ...] = ()) -> Program:
    """A kernel of a file in ``kernels/``."""
    headers = {p.name: p.read_text() for p in KERNELS.glob("*.cuh")}
    options = [f"-D{d}" for d in defines]
    source = (KERNELS / file).read_text()
    return EmulatedDevice(arch).compile_source(source, options, file, headers).program(symbol)


def pointer(array: np.ndarray) -> np.ndarray:
    return np.uint64(array.ctypes.data)


@functools.cache
def attention_case(n: int, heads: int, causal: bool, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v in bf16 as [n, heads, 64] and the answer in float64."""
    data = np.random.default_rng(seed).standard_normal((3, n, heads, HEAD_DIM))
    q, k, v = (device_array(x.shape, BF16, x) for x in data)
    qf, kf, vf = (x.astype(np.float64) for x in (q, k, v))
    mask = np.where(np.tri(n) if causal else True, 0, -np.inf)
    s = np.einsum("ihd,jhd->hij", qf, kf) / math.sqrt(HEAD_DIM) + mask
    p = np.exp(s - s.max(-1, keepdims=True))
    return q, k, v, np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), vf)


def attend(
    device: EmulatedDevice,
    file: str,
    n: int,
    heads: int,
    causal: bool,
    seed: int = 0,
    defines: Sequence[str] = (),
) -> tuple[float, Report]:
    """Runs fa2.cu or fa3.cu; the largest error (infinite for a NaN) and the report."""
    q, k, v, expected = attention_case(n, heads, causal)
    out = device_array((n, heads, HEAD_DIM), BF16)
    scale = np.float32(math.log2(math.e) / math.sqrt(HEAD_DIM))
    tail = [pointer(out), np.int32(n), np.int32(heads), scale]
    defines = (*defines, f"CAUSAL={int(causal)}")
    if file == "fa2.cu":
        program = load(file, device.arch, "fa2_fwd", defines)
        inputs, threads, smem = [pointer(x) for x in (q, k, v)], 128, 5 * 8192
    else:
        program = load(file, device.arch, "fa3_fwd", defines)
        shape, strides, box = (heads * HEAD_DIM, n), (heads * HEAD_DIM * 2,), (64, 64)
        inputs = [encode_tiled(9, x.ctypes.data, shape, strides, box, swizzle=3) for x in (q, k, v)]
        threads, smem = 256, 5 * 8192 + 64
    grid = (-(-n // 64), heads)
    report = device.run(
        program, grid, (threads,), smem, [*inputs, *tail], [q, k, v, out], seed=seed
    )
    error = np.abs(out.astype(np.float64) - expected)
    return float(np.nan_to_num(error, nan=np.inf).max()), report
