"""Launching the search for requests that begin alike; arguments are validated already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .device import Device
from .launch import launch
from .params import KernelArgs, ParamsLayout
from .plan import Plan
from .variant import Variant

__all__ = [
    "PREFIX_PARAMS",
    "SEARCH_CTAS",
    "SEARCH_THREADS",
    "Search",
    "prefix_variants",
    "search_prefixes",
    "search_variant",
]

PREFIX_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("block_table", "cu_seqlens_q", "seqused_k", "order", "tree")),
    ("table_row_stride", "i64"),
    *((n, "i32") for n in ("batch", "levels", "page_size", "columns", "null_block", "unused")),
)
"""The layout of ``core/prefix_params.cuh``."""

SEARCH_THREADS, SEARCH_CTAS = 512, 8
"""One cluster."""


class Search(NamedTuple):
    """What is compared, and where the tree goes.

    Attributes
    ----------
    block_table, cu_seqlens_q, seqused_k : array
        The second may be None: one query a request.
    page_size, null_block : int
    tree : array [(2 * levels + 1) * batch], int32
        As `PrefixTree.buffer`.
    levels : int
    """

    block_table: Any
    cu_seqlens_q: Any
    seqused_k: Any
    page_size: int
    null_block: int
    tree: Any
    levels: int

    def pack(self, device: Device) -> bytes:
        """The parameters of the kernel."""
        batch, columns = self.block_table.shape
        each, at, starts = self.levels * batch * 4, device.pointer, self.cu_seqlens_q
        return PREFIX_PARAMS.pack(
            at(self.block_table), 0 if starts is None else at(starts), at(self.seqused_k),
            at(self.tree) + 2 * each, at(self.tree), self.block_table.strides[0], batch,
            self.levels, self.page_size, columns, self.null_block, 0,
        )  # fmt: skip

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the kernel reads or writes."""
        return self.block_table, self.cu_seqlens_q, self.seqused_k, self.tree


def prefix_variants(arch: str) -> Iterator[Variant]:
    """The search, on 9.0, where its tree is of use."""
    if arch == "sm_90":
        yield search_variant()


def search_variant() -> Variant:
    """The kernel that compares block tables."""
    nbytes = PREFIX_PARAMS.nbytes
    return Variant("find_prefixes.cu", "find_prefixes", "sm_90a", (("PARAMS_NBYTES", nbytes),))


def search_prefixes(device: Device, search: Search, stream: int) -> None:
    """Queue the search.

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    grid, block = (SEARCH_CTAS, 1, 1), (SEARCH_THREADS, 1, 1)
    plan = Plan(search_variant(), grid, block, programmatic=True)
    launch(device, plan, KernelArgs((search.pack(device),), search.arrays), stream)
