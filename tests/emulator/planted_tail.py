"""Bugs planted in the 8-bit Hopper prefill where its last tiles are cut into pieces."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from dataclasses import dataclass

from tails import cut_tails

from cupyflash.testing import Case

from .planted import Planted

__all__ = ["PLANTED_TAIL"]

KERNEL = "attention_fwd_sm90_fp8.cu"
_TILES = Case(lengths=((140, 500),), num_heads_kv=1, group_size=2, head_dim=128, causal=True,
              descale=True, q_type="e4m3", kv_type="e4m3")  # fmt: skip
# Some warps of a piece run again, others do not.
_AGAIN = _TILES.replace(pattern="outlier", softmax_scale=60.0)


@dataclass(frozen=True)
class _Tail(Planted):
    left: int = 2
    cut: int = 3

    def attend(self) -> None:
        with cut_tails(self.left, self.cut):
            super().attend()


PLANTED_TAIL = [
    _Tail("tail: nothing", KERNEL, "", "", _TILES),
    _Tail("tail: nothing, tiles that run again", KERNEL, "", "", _AGAIN),
    _Tail(
        "tail: one lane arrives before the others have left theirs",
        KERNEL,
        r"    __syncwarp\(\);\n(    u32 before = 0;)",
        r"\1",
        _TILES,
    ),
    _Tail(
        "tail: what others left is read by lanes that have not waited",
        KERNEL,
        r"    __syncwarp\(\);  // what the others left",
        r"    // what the others left",
        _TILES,
    ),
    _Tail("tail: the last but one merges", KERNEL, r"before \+ 1 != x\.cut", r"before + 2 != x.cut", _TILES),
    _Tail("tail: counters wrap one late", KERNEL, r"warp, x\.cut - 1\)", r"warp, x.cut)", _TILES),
    _Tail("tail: pieces overlap", KERNEL, r"share\(tiles \* \(piece \+ 1\)\)", r"share(tiles * (piece + 1)) + 1", _TILES),
    _Tail("tail: a piece too few is merged", KERNEL, r"piece < x\.cut; \+\+piece", r"piece < x.cut - 1; ++piece", _TILES),
    _Tail("tail: half of a factor", KERNEL, r"value\[e\] \* half\[e / 2\], half", r"value[e], half", _TILES),
    _Tail("tail: pieces that failed arrive", KERNEL, r"!__any_sync\(0xffffffffu, failed\) && merge", r"merge", _AGAIN),
    _Tail(
        "tail: pieces that ran again do not arrive",
        KERNEL,
        r"too_large\(t, left\)\) && gather\(t, true\)",
        "too_large(t, left)) && false",
        _AGAIN,
    ),
    _Tail(
        "tail: warps that had not failed arrive again",
        KERNEL,
        r"__any_sync\(0xffffffffu, too_large\(t, left\)\) && gather",
        "(true || left[0] > 0.f) && gather",
        _AGAIN,
    ),
]  # fmt: skip
