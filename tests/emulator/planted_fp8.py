"""Bugs planted in the 8-bit Hopper prefill."""

from __future__ import annotations

from cupyflash.testing import Case

from .planted import Planted

__all__ = ["PLANTED_FP8"]

KERNEL = "attention_fwd_sm90_fp8.cu"
_TILES = Case(lengths=((140, 500),), num_heads_kv=1, group_size=2, head_dim=64, causal=True,
              descale=True, q_type="e4m3", kv_type="e4m3")  # fmt: skip
_TAIL = _TILES.replace(lengths=((33, 0), (70, 7)), causal=False)  # tiles with rows of others
_GROWING = _TILES.replace(pattern="outlier", lengths=((64, 700),), group_size=1, head_dim=128)
_WIDE = _TILES.replace(head_dim=256)
_GROWING_WIDE = _TILES.replace(lengths=((140, 900),), group_size=1, head_dim=256, causal=False,
                               descale=False, softmax_scale=0.1)  # fmt: skip
_NEGATIVE = _TILES.replace(pattern="opposed", causal=False)
_BACKWARDS = _TILES.replace(softmax_scale=-0.5)
_LOUD = _GROWING.replace(softmax_scale=60.0)
_AGAIN = Case(lengths=((130, 30), (200, 0)), group_size=2, head_dim=128, causal=True, page_size=16,
              pattern="outlier", q_type="e4m3", kv_type="e4m3")  # fmt: skip


def _wait(barrier: str) -> str:
    return rf"mbarrier_wait<S::{barrier}>\([^;]*;"


PLANTED_FP8 = [
    Planted("fp8: nothing", KERNEL, "", "", _TILES),
    Planted("fp8: no wait for keys", KERNEL, _wait("kKeyFullAt"), ";", _TILES),
    Planted("fp8: no wait for transposed values", KERNEL, _wait("kTurnedFullAt"), ";", _TILES),
    Planted(
        "fp8: keys are given back in the place of values",
        KERNEL,
        r"mbarrier_arrive<S::kKeyEmptyAt>",
        "mbarrier_arrive<S::kTurnedEmptyAt>",
        _TILES,
    ),
    Planted(
        "fp8: products read the keys of the first buffer",
        KERNEL,
        r"k\.slot \* \(S::kKeyBytes / 16\)",
        "0",
        _TILES.replace(causal=False),
    ),
    Planted(
        "fp8: one transposing warp is enough",
        KERNEL,
        r"turned_full\[i\]\), kTransposingWarps\)",
        "turned_full[i]), 1)",
        _TILES,
    ),
    Planted(
        "fp8: no proxy fence after the transposition",
        KERNEL,
        r"      fence_async_proxy\(\);\n      __syncwarp\(\);\n",
        "      __syncwarp();\n",
        _TILES,
    ),
    Planted(
        "fp8: transposed values are there when one lane's are",
        KERNEL,
        r"      fence_async_proxy\(\);\n      __syncwarp\(\);\n",
        "      fence_async_proxy();\n",
        _TILES,
    ),
    Planted(
        "fp8: rows of values are read after these are given back",
        KERNEL,
        r"(mbarrier_arrive\(shared_address\(&r\.value_empty\[v\.slot\]\)\);)",
        r"\1\n        if (r.until[v.slot] < -(1 << 30)) return;",
        _TILES,
    ),
    Planted(
        "fp8: rows of nobody are not cleared",
        KERNEL,
        r"if \(from > 0 \|\| until < kKeys\)",
        "if (false)",
        _TAIL,
    ),
    Planted(
        "fp8: keys of P in plain order",
        KERNEL,
        r"16 \* \(group / 4\) \+ 8 \* \(group % 4 / 2\) \+ 2 \* \(group % 2\)",
        "16 * (group / 4) + 4 * (group % 4)",
        _TILES,
        switch=False,
    ),
    Planted(
        "fp8: columns of V in plain order",
        KERNEL,
        r"o\[i \+ 4\] \* norm, o\[i \+ 1\] \* norm",
        "o[i + 1] * norm, o[i + 4] * norm",
        _TILES,
    ),
    Planted(
        "fp8: O is not added up",
        KERNEL,
        r"fmaf\(o\[i\], due\[i / 2 % 2\], total\[i\]\)",
        "o[i] * due[i / 2 % 2]",
        _TILES,
    ),
    Planted(
        "fp8: outputs are not due what weights were divided by",
        KERNEL,
        r"fmaf\(o\[i\], due\[i / 2 % 2\], total\[i\]\)",
        "fmaf(o[i], 0x1p-8f, total[i])",
        _TILES,
    ),
    Planted(
        "fp8: a lane's largest score is taken for the row's",
        KERNEL,
        r"quad_max\(__int_as_float\(top\[h\]\)\)",
        "__int_as_float(top[h])",
        _GROWING,
        wants_lse=False,
    ),
    Planted(
        "fp8: two lanes' largest score is taken for the row's, with exact sums",
        KERNEL,
        r"row\[h\] = max\(row\[h\], __shfl_xor_sync\(0xffffffffu, row\[h\], 2\)\);",
        ";",
        _GROWING,
    ),
    Planted(
        "fp8: no ones behind the values",
        KERNEL,
        r"= 0x38383838u;",
        "= 0;",
        _TILES,
        wants_lse=False,
    ),
    Planted(
        "fp8: the sum of the rounded weights is taken four times",
        KERNEL,
        r"V::kSumColumn \? 0\.25f \* sum\[h\] : sum\[h\]",
        "sum[h]",
        _TILES,
        wants_lse=False,
    ),
    Planted(
        "fp8: the sum of the rounded weights is not due what the output is",
        KERNEL,
        r"fmaf\(o\[kDim / 2 \+ 2 \* h\], due\[h\], sum\[h\]\)",
        "o[kDim / 2 + 2 * h] + sum[h]",
        _TILES,
        wants_lse=False,
    ),
    Planted(
        "fp8: a lane's largest score is taken for the row's where there are masks",
        KERNEL,
        r"return quad_max\(top\) \* fabsf\(scale\);",
        "return top * fabsf(scale);",
        _TILES,
    ),
    Planted(
        "fp8: the largest of negative scores is the one of the largest bits",
        KERNEL,
        r"if \(top\[h\] < 0\) top\[h\] = static_cast<int>\(least\);",
        ";",
        _NEGATIVE,
    ),
    Planted(
        "fp8: scores of a negative scale are compared as they are",
        KERNEL,
        r"!V::kScoreMod && W::scale < 0\.f \? begin : ",
        "",
        _BACKWARDS,
    ),
    Planted(
        "fp8: weights beyond the format",
        KERNEL,
        r"none \? 0\.f : largest\[h\] - kTop;",
        "c[h] - kTop;",
        _GROWING,
    ),
    Planted(
        "fp8: tiles whose sums are too large are not run again",
        KERNEL,
        r"!\(sum\[h\] < W::kLargestSum\)",
        "false",
        _LOUD,
    ),
    Planted(
        "fp8, 256 wide: sums of the rest are not rescaled",
        KERNEL,
        r"W::move_shift\(added, settled, factor\);\n      rescale\(factor\)",
        "W::move_shift(added, settled, factor)",
        _GROWING_WIDE,
    ),
    Planted(
        "fp8, 256 wide: weights beyond the format",
        KERNEL,
        r"return settled \? fminf[^;]*;",
        "return 1e6f;",
        _GROWING_WIDE,
    ),
    Planted(
        "fp8: one key too many is seen",
        KERNEL,
        r"= bits_before\(high\)",
        "= bits_before(high + 1)",
        _TILES,
    ),
    Planted(
        "fp8, 256 wide: one key too many is seen", KERNEL, r"at >= high\)", "at > high)", _WIDE
    ),
    Planted(
        "fp8: a tile is overwritten while it is read",
        KERNEL,
        r"kTiles = 8;",
        "kTiles = 2;",
        _AGAIN,
    ),
    Planted("fp8, 256 wide: nothing", KERNEL, "", "", _WIDE),
    Planted(
        "fp8, 256 wide: values in the buffer of the next ones",
        KERNEL,
        r"slot = k\.slot \^ 1",
        "slot = k.slot",
        _WIDE,
    ),
    Planted(
        "fp8, 256 wide: values waited for in the wrong phase",
        KERNEL,
        r"k\.parity \^ slot\)",
        "k.parity)",
        _WIDE,
    ),
    Planted(
        "fp8, 256 wide: every part of O from the first columns",
        KERNEL,
        r"kDim \+ part \* kColumns",
        "kDim",
        _WIDE,
    ),
    Planted(
        "fp8, 256 wide: queries given back before their last product",
        KERNEL,
        r"if \(n == t\.n_begin\) leave_queries",
        "if (n == t.n_begin + 1) leave_queries",
        _WIDE,
    ),
    Planted(
        "fp8: values of a tile before it is described",
        KERNEL,
        r"mbarrier_wait\(shared_address\(&r\.tile_full[^;]*;",
        ";",
        _TILES,
    ),
]
