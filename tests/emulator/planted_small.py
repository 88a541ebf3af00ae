"""Bugs planted in the 8-bit conversion and the search for shared prefixes."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from functools import partial

import numpy as np

from cupyflash import find_prefix_tree, quantize_fp8
from cupyflash.prefix_search import shared_groups
from cupyflash.prefix_tree import PrefixTree
from cupyflash.testing import DTYPES

from .device import device_array
from .planted_rows import planted_row

__all__ = ["PLANTED_SMALL"]

QUANTIZE, SCALE, SEARCH = "quantize_fp8.cu", "fp8_scale.cu", "find_prefixes.cu"


def _convert(tokens: int = 37, heads: int = 4, dim: int = 64, odd: bool = False) -> None:
    x = np.random.default_rng(5).standard_normal((tokens, heads, dim + odd)).astype(np.float32)
    x *= 10.0 ** np.arange(-2, heads - 2)[:, None]
    given = device_array(x.shape, DTYPES["bf16"], x.astype(DTYPES["bf16"]))[..., int(odd) :]
    out = device_array((tokens, heads, dim))
    bits, scale = quantize_fp8(given, "head", out=out)
    largest = np.abs(given.astype(np.float32)).max(axis=(0, 2))
    assert (scale == largest / np.float32(448)).all()
    values = (given.astype(np.float32) / scale[:, None]).astype(DTYPES["e4m3"])
    assert values.tobytes() == bits.tobytes()


def _narrow() -> None:
    _convert(odd=True)


def _search() -> None:
    rng = np.random.default_rng(6)
    table = device_array((9, 300), np.int32, rng.integers(0, 2, (9, 300)))
    table[::2, :280], table[[0, 4], :290] = 7, 8
    lengths = device_array(9, np.int32, rng.integers(4000, 4700, 9))
    table[[3, 5], :2] = -1
    found = find_prefix_tree(table, lengths, 16, levels=2, null_block=3)
    groups = shared_groups(table, lengths - 1, 16, levels=2, null_block=3)
    right = {(frozenset(map(int, members)), tokens) for members, tokens in groups}
    assert _groups(found) == right


def _groups(tree: PrefixTree) -> set[tuple[frozenset[int], int]]:
    return {
        (frozenset(tree.order[at : at + count].tolist()), int(keys))
        for level in tree.nodes
        for at, (count, keys) in enumerate(level)
        if count > 0
    }


_planted = partial(planted_row, num_sms=4)

PLANTED_SMALL = [
    _planted("quantize: nothing", QUANTIZE, "", "", _convert),
    _planted("quantize: nothing, odd rows", QUANTIZE, "", "", _narrow),
    _planted("quantize: wide accesses to odd rows", QUANTIZE, r"if \(p\.vectorised\)", "if (true)", _narrow),
    _planted("quantize: the scale of the first group", QUANTIZE, r"p\.largest\[group \* p\.pieces \+ i\]", "p.largest[i]", _convert),
    _planted("quantize: a row past the last", QUANTIZE, r"row < rows; row \+= step", "row <= rows; row += step", _convert),
    _planted("scale: rows of one warp alone", SCALE, r"for \(int i = 1; i < kWarps", "for (int i = 1; i < 1", _convert),
    _planted("scale: read before all warps are done", SCALE, r"__syncthreads\(\);", ";", _convert),
    _planted("scale: a lane is left out", SCALE, r"lane > 0; lane /= 2", "lane > 1; lane /= 2", _convert),
    _planted("scale: pieces of all groups in one place", SCALE, r"group \* p\.pieces \+ blockIdx\.x", "blockIdx.x", _convert),
    _planted("search: nothing", SEARCH, "", "", _search),
    _planted("search: places are taken before all are free", SEARCH, r"(x\.slot\[i\] = kNone;\s*)__syncthreads\(\);", r"\1", _search),
    _planted("search: leaders are read before all have come", SEARCH, r"__syncthreads\(\);(\s*bool shared)", r"\1", _search),
    _planted("search: a block that is none", SEARCH, r"return block >= 0 && block", "return block", _search),
]  # fmt: skip
