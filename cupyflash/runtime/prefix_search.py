"""Launching the search for requests that begin alike; arguments are validated already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .device import Device
from .launch import launch
from .params import KernelArgs, ParamsLayout
from .plan import Plan
from .variant import Variant

__all__ = ["PREFIX_PARAMS", "prefix_variants", "search_prefixes", "search_variant"]

PREFIX_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("block_table", "cu_seqlens_q", "seqused_k", "order", "tree")),
    ("table_row_stride", "i64"),
    *((n, "i32") for n in ("batch", "levels", "page_size", "columns", "null_block", "unused")),
)
"""The layout of ``core/prefix_params.cuh``."""

_THREADS, _CTAS = 512, 8  # one cluster


def prefix_variants(arch: str) -> Iterator[Variant]:
    """The search, on 9.0, where its tree is of use."""
    if arch == "sm_90":
        yield search_variant()


def search_variant() -> Variant:
    """The kernel that compares block tables."""
    nbytes = PREFIX_PARAMS.nbytes
    return Variant("find_prefixes.cu", "find_prefixes", "sm_90a", (("PARAMS_NBYTES", nbytes),))


def search_prefixes(
    device: Device,
    block_table: Any,
    cu_seqlens_q: Any,
    seqused_k: Any,
    page_size: int,
    null_block: int,
    tree: Any,
    levels: int,
    stream: int,
) -> None:
    """Queue the search.

    Parameters
    ----------
    device : Device
    block_table, cu_seqlens_q, seqused_k : array
        The second may be None: one query a request.
    page_size, null_block : int
    tree : array [(2 * levels + 1) * batch], int32
        As `PrefixTree.buffer`.
    levels : int
    stream : int

    Raises
    ------
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    batch, columns = block_table.shape
    each, at = levels * batch * 4, device.pointer
    plan = Plan(search_variant(), (_CTAS, 1, 1), (_THREADS, 1, 1), programmatic=True)
    packed = PREFIX_PARAMS.pack(
        at(block_table), 0 if cu_seqlens_q is None else at(cu_seqlens_q), at(seqused_k),
        at(tree) + 2 * each, at(tree), block_table.strides[0], batch, levels, page_size, columns,
        null_block, 0,
    )  # fmt: skip
    launch(
        device, plan, KernelArgs((packed,), (block_table, cu_seqlens_q, seqused_k, tree)), stream
    )
