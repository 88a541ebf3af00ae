"""Bugs planted where the warps of a decode block share a ring of the keys of several heads."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from cupyflash.testing import Case

from .planted import DECODE, Planted

__all__ = ["PLANTED_SIDE"]

_SIDE = Case(lengths=((1, 500), (1, 300), (1, 90)), num_heads_kv=8, group_size=1, head_dim=128,
             page_size=16, causal=True, q_type="bf16", kv_type="bf16")  # fmt: skip
_MANY = _SIDE.replace(group_size=4)  # more rows than warps
_EVEN = _SIDE.replace(lengths=((1, 600),) * 2)

PLANTED_SIDE = [
    Planted("side: nothing", DECODE, "", "", _SIDE, calls=2),
    Planted("side: nothing, all alike", DECODE, "", "", _EVEN, calls=2),
    Planted("side: the first warp that is done asks", DECODE, r"before, 0\) == others", "before, 0) == 0", _SIDE),
    Planted("side: warps are done without order", DECODE, r"atom\.acq_rel\.cta\.shared\.inc", "atom.relaxed.cta.shared.inc", _SIDE),
    Planted("side: counters not 0 at first", DECODE, r"store_shared4\(barriers \+[^;]*;", ";", _SIDE),
    Planted("side: asked for before barriers are there", DECODE, r"__syncthreads\(\);(\s*\} else \{\s*__syncwarp)", r"\1", _EVEN),
    Planted("side: all warps take the first head", DECODE, r"\? side_head \* kSideBytes : 0", "? 0 : 0", _SIDE),
    Planted("side: bytes of one head expected", DECODE, r"\(d\.k_panels \+ d\.v_panels\) << sharers_shift", "(d.k_panels + d.v_panels)", _SIDE),
    Planted("side: values read before other lanes wrote them", DECODE, r"__syncwarp\(\);(\s*store_own)", r"\1", _MANY),
    Planted("side: arrived before all warps wrote", DECODE, r"if \(kLone && !mailed\) __syncthreads\(\);", "", _MANY),
    Planted("side: a part too many", DECODE, r"if \(i >= count\) state", "if (i > count) state", _MANY),
    Planted("side: rows past the last", DECODE, r"all_row >= all_rows \|\| column", "column", _MANY.replace(group_size=5), always=False),
    Planted("side: rows of another head", DECODE, r"parts_of\(piece, first, side \* d\.row_block \+ row\);\n#pragma", "parts_of(piece, first, all_row);\n#pragma", _MANY),
    Planted("side: of the last part only", DECODE, r"parts\.row_of\(min\(i, count - 1\)\)", "parts.row_of(count - 1)", _MANY),
]  # fmt: skip
