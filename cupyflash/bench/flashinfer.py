"""FlashInfer as a peer: its cascade, decode and prefill, planned outside the timed call."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .case import BenchCase
from .inputs import BenchInputs
from .providers import NoKernelError

__all__ = ["cascade_levels", "flashinfer"]


def flashinfer(inputs: BenchInputs, torch: Any) -> Callable[[], Any]:
    """A callable for bf16 attention; a step around it is not FlashInfer's."""
    case = inputs.case
    if case.kind != "attention" or (case.q_type, case.kv_type) != ("bf16", "bf16"):
        raise NoKernelError("bf16 attention only")
    if case.step:
        raise NoKernelError("attention alone, without a step around it")
    if importlib.util.find_spec("flashinfer") is None:
        raise NoKernelError("flashinfer is not installed")
    library = importlib.import_module("flashinfer")
    missing = importlib.import_module("flashinfer.jit.core").MissingJITCacheError
    try:
        return _Planned(inputs, torch, library).callable()
    except missing as error:  # FLASHINFER_DISABLE_JIT is set and the module was not built ahead
        raise NoKernelError("flashinfer's kernel for it was not built ahead") from error


class _Planned:
    def __init__(self, inputs: BenchInputs, torch: Any, library: Any) -> None:
        self._inputs, self._case, self._torch, self._library = inputs, inputs.case, torch, library
        self._q, self._k, self._v, self._out = (
            torch.from_dlpack(x) for x in (inputs.q, inputs.k, inputs.v, inputs.out)
        )
        self._heads = (self._case.num_heads_q, self._case.num_heads_kv, self._case.head_dim)
        self._workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._masks = {
            "causal": self._case.causal,
            "window_left": self._case.window[0],
            "logits_soft_cap": self._case.softcap or None,
            "sm_scale": inputs.softmax_scale,
            "q_data_type": self._q.dtype,
        }

    def callable(self) -> Callable[[], Any]:
        if self._case.page_size is None:
            return self._packed()
        if self._case.prefix_levels:
            return self._cascade()
        return self._paged(self._case.page_size)

    def _ints(self, values: Any) -> Any:
        return self._torch.tensor(np.asarray(values, np.int32), device="cuda")

    def _starts(self, counts: Sequence[int]) -> Any:
        return self._ints([0, *np.cumsum(counts)])

    def _packed(self) -> Callable[[], Any]:
        wrapper = self._library.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", backend="fa3"
        )
        starts = self._starts(self._case.q_lens), self._starts(self._case.k_lens)
        wrapper.plan(*starts, *self._heads, kv_data_type=self._k.dtype, **self._masks)
        return lambda: wrapper.run(self._q, self._k, self._v, out=self._out)

    def _pages(self, rows: Any, lengths: Sequence[int], page: int) -> tuple[Any, Any, Any]:
        """Starts, page numbers and tokens of the last page, as its plans take them."""
        counts = [-(-n // page) for n in lengths]
        pages = np.concatenate([row[:n] for row, n in zip(rows, counts, strict=True)])
        return (
            self._starts(counts),
            self._ints(pages),
            self._ints([(n - 1) % page + 1 for n in lengths]),
        )

    def _paged(self, page: int) -> Callable[[], Any]:
        table = self._inputs.block_table.get()
        pages = self._pages(table, self._case.k_lens, page)
        if max(self._case.q_lens) == 1:
            masks = {name: given for name, given in self._masks.items() if name != "causal"}
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=True
            )
            wrapper.plan(*pages, *self._heads, page, kv_data_type=self._k.dtype, **masks)
        else:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa3"
            )
            starts = self._starts(self._case.q_lens)
            wrapper.plan(
                starts, *pages, *self._heads, page, kv_data_type=self._k.dtype, **self._masks
            )
        return lambda: wrapper.run(self._q, (self._k, self._v), out=self._out)

    def _cascade(self) -> Callable[[], Any]:
        case, page = self._case, self._case.page_size or 1
        columns: list[list[Any]] = [[], [], [], []]
        for queries, rows, lengths in cascade_levels(case, self._inputs.block_table.get()):
            level = self._starts(queries), *self._pages(rows, lengths, page)
            for column, array in zip(columns, level, strict=True):
                column.append(array)
        wrapper = self._library.MultiLevelCascadeAttentionWrapper(
            len(columns[0]), self._workspace, "NHD"
        )
        wrapper.plan(*columns, *self._heads, page, **self._masks)
        return lambda: wrapper.run(self._q, (self._k, self._v))


def cascade_levels(case: BenchCase, table: Any) -> list[tuple[list[int], list[Any], list[int]]]:
    """For each prefix level, and last for the own keys: queries, pages and keys of each group."""
    found, first, batch = [], 0, len(case.q_lens)
    for tokens, sharers in (*case.prefix_levels, (0, 1)):
        leaders = range(0, batch, sharers)
        queries = [sum(case.q_lens[i : i + sharers]) for i in leaders]
        lengths = [tokens or case.k_lens[i] - first for i in leaders]
        rows = [table[i, first // (case.page_size or 1) :] for i in leaders]
        found.append((queries, rows, lengths))
        first += tokens
    return found
