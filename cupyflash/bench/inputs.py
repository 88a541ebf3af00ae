"""Arrays of one benchmark case: random ones on the GPU, or ones without memory to plan with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyflash.runtime.dry_device import reserved

from .case import BenchCase

__all__ = ["BenchInputs", "DryInputs"]

_STORAGE = {"bf16": ml_dtypes.bfloat16, "e4m3": np.uint8, "fp32": np.float32}


class BenchInputs:
    """Inputs and outputs of one case, as CuPy arrays; pages are in random order.

    Attributes
    ----------
    xp : module
        CuPy.
    q, out : cupy.ndarray [total_q, Hq, D], [total_q, Hq, Dv]
    k, v : cupy.ndarray
        Packed, or pages with ``block_table [batch, max_blocks]``.
    cu_seqlens_q, cu_seqlens_k : cupy.ndarray [batch + 1]
    seqused_k : cupy.ndarray [batch]
    """

    def __init__(self, case: BenchCase, seed: int) -> None:
        import cupy

        self._rng = cupy.random.default_rng(1234 + seed)
        self._make(case, cupy, seed)

    def _make(self, case: BenchCase, xp: Any, seed: int) -> None:
        self.case, self.xp = case, xp
        batch = len(case.q_lens)
        self.batch, self.max_seqlen_q, self.max_seqlen_k = batch, max(case.q_lens), max(case.k_lens)
        self.softmax_scale = case.head_dim**-0.5
        self.cu_seqlens_q = xp.asarray(np.cumsum([0, *case.q_lens]), np.int32)
        self.cu_seqlens_k = xp.asarray(np.cumsum([0, *case.k_lens]), np.int32)
        self.seqused_k = xp.asarray(case.k_lens, np.int32)
        heads = case.num_heads_q
        self.q = self._normal((case.total_q, heads, case.head_dim), case.q_type)
        self.out = self._empty((case.total_q, heads, case.head_dim_v), ml_dtypes.bfloat16)
        self.block_table: Any = None
        if case.kind == "merge":
            self.states = [self._normal(self.out.shape, "bf16") for _ in range(2)]
            self.lses = [self._normal((heads, case.total_q), "fp32") for _ in range(2)]
            self.lse_out = self._empty((heads, case.total_q), np.float32)
        elif case.kind == "write":
            self._write_inputs()
        elif case.page_size:
            self._paged(np.random.default_rng(seed))
        else:
            shape = (case.total_k, case.num_heads_kv)
            self.k = self._normal((*shape, case.head_dim), case.kv_type)
            self.v = self._normal((*shape, case.head_dim_v), case.kv_type)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.xp.empty(shape, dtype)

    def _normal(self, shape: tuple[int, ...], kind: str) -> Any:
        """Standard normal values; e4m3 comes as its bytes in uint8."""
        out = self._empty(shape, _STORAGE[kind])
        flat = out.reshape(-1)
        for start in range(0, flat.size, 1 << 27):
            part = flat[start : start + (1 << 27)]
            values = self._rng.standard_normal(part.size, dtype=np.float32)
            part[...] = _e4m3_bytes(values) if kind == "e4m3" else values
        return out

    def _paged(self, order: np.random.Generator) -> None:
        case = self.case
        page = case.page_size or 1
        table, blocks = _block_table(case, page, order)
        self.block_table = self.xp.asarray(table)
        width = (blocks, page, case.num_heads_kv)
        self.k = self._normal((*width, case.head_dim), case.kv_type)
        if case.kind != "mla":
            self.v = self._normal((*width, case.head_dim_v), case.kv_type)

    def _write_inputs(self) -> None:
        case = self.case
        tokens, page = case.total_q, case.page_size or 16
        shape = (tokens, case.num_heads_kv, case.head_dim)
        self.key, self.value = self._normal(shape, "bf16"), self._normal(shape, "bf16")
        cache = (2, 2 * -(-tokens // page), page, case.num_heads_kv, case.head_dim)
        self.k, self.v = self._empty(cache, ml_dtypes.bfloat16)
        slots = np.random.default_rng(0).permutation(cache[1] * page)[:tokens]
        self.slot_mapping = self.xp.asarray(slots, np.int64)


class DryInputs(BenchInputs):
    """The same as NumPy arrays; lengths and tables are right, the others have no memory."""

    def __init__(self, case: BenchCase) -> None:
        self._make(case, np, 0)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return reserved(shape, dtype)

    def _normal(self, shape: tuple[int, ...], kind: str) -> Any:
        return reserved(shape, _STORAGE[kind])


def _block_table(
    case: BenchCase, page: int, order: np.random.Generator
) -> tuple[np.ndarray[Any, Any], int]:
    """Pages in random order; requests of one group share the pages of its prefix levels."""
    batch = len(case.k_lens)
    table = np.zeros((batch, -(-max(case.k_lens) // page)), np.int32)
    used, first = 0, 0
    for tokens, sharers in case.prefix_levels:
        columns = tokens // page
        for start in range(0, batch, sharers):
            table[start : start + sharers, first : first + columns] = range(used, used + columns)
            used += columns
        first += columns
    for row, length in zip(table, case.k_lens, strict=True):
        columns = -(-length // page) - first
        row[first : first + columns] = range(used, used + columns)
        used += columns
    return order.permutation(used).astype(np.int32)[table], used


def _e4m3_bytes(values: Any) -> Any:
    """Round float32 to e4m3 on the GPU: through 16-bit floats, whose exponent is wide enough."""
    import cupy as cp

    clipped = cp.clip(values, -448, 448)
    magnitude = cp.abs(clipped)
    exponent = cp.clip(cp.floor(cp.log2(cp.maximum(magnitude, 2.0**-6))), -6, 8)
    steps = cp.rint(magnitude * cp.exp2(3 - exponent))
    code = steps + (exponent + 6) * 8
    return (code.astype(cp.uint8)) | (cp.signbit(clipped).astype(cp.uint8) << 7)
