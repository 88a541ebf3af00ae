"""Bugs planted in the Hopper prefill over an 8-bit cache."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from cupyflash.testing import Case

from .planted import Planted

__all__ = ["PLANTED_FP8KV"]

KERNEL = "attention_fwd_sm90_widen.cu"
_TILES = Case(lengths=((140, 400),), num_heads_kv=1, group_size=2, head_dim=64, causal=True,
              descale=True, q_type="bf16", kv_type="e4m3")  # fmt: skip
_TAIL = _TILES.replace(lengths=((33, 0), (70, 7)), causal=False)  # tiles with rows of others
_HEADS = _TILES.replace(lengths=((140, 30),), num_heads_kv=2, group_size=1, head_dim=128)
_WIDE = _TILES.replace(head_dim=192, lengths=((140, 100),))
_WIDEST = _HEADS.replace(head_dim=256)
_CAP = _HEADS.replace(softcap=5.0)
_AGAIN = _HEADS.replace(lengths=((300, 400),), pattern="spiky")  # tiles that run again


PLANTED_FP8KV = [
    Planted("fp8kv: nothing", KERNEL, "", "", _TILES),
    Planted("fp8kv: nothing, with tails", KERNEL, "", "", _TAIL),
    Planted(
        "fp8kv: keys are widened before they are there",
        KERNEL,
        r"mbarrier_wait\(shared_address\(&r\.key_full\[at\.raw\(\)\]\), at\.raw_parity\(\)\);",
        ";",
        _TILES,
    ),
    Planted(
        "fp8kv: values are widened before they are there",
        KERNEL,
        r"mbarrier_wait\(shared_address\(&r\.value_full\[at\.raw\(\)\]\), at\.raw_parity\(\)\);",
        ";",
        _TILES,
    ),
    Planted(
        "fp8kv: keys over those that are multiplied",
        KERNEL,
        r"wait_empty\(at, wide\.key_empty\[at\.slot\(\)\]\);",
        "",
        _TILES,
    ),
    Planted(
        "fp8kv: values over those that are multiplied",
        KERNEL,
        r"wait_empty\(at, wide\.value_empty\[at\.slot\(\)\]\);",
        "",
        _TILES,
    ),
    Planted(
        "fp8kv: stored keys over those that are widened",
        KERNEL,
        r"mbarrier_wait\(shared_address\(&empty\[at\.slot\]\), at\.parity \^ 1\);\n          const u32",
        "const u32",
        _TILES,
    ),
    Planted(
        "fp8kv: one of two warps is enough",
        KERNEL,
        r"key_full\[i\]\), V::kFillers\)",
        "key_full[i]), 1)",
        _TILES,
    ),
    Planted(
        "fp8kv: a buffer is free when one of two warps is done with it",
        KERNEL,
        r"value_empty\[i\]\), V::kFillers\)",
        "value_empty[i]), 1)",
        _TILES,
    ),
    Planted(
        "fp8kv: no proxy fence after widening",
        KERNEL,
        r"if \(last\) fence_async_proxy\(\);",
        "",
        _TILES,
    ),
    Planted(
        "fp8kv: a tile is there when one lane's part is",
        KERNEL,
        r"(if \(last\) fence_async_proxy\(\);\n)    __syncwarp\(\);",
        r"\1",
        _TILES,
    ),
    Planted(
        "fp8kv: rows of nobody are not cleared",
        KERNEL,
        r"if \(begin > 0 \|\| end < kKeys\) clear_rows",
        "if (false) clear_rows",
        _TAIL,
    ),
    Planted(
        "fp8kv: one row of nobody is taken",
        KERNEL,
        r"row % kRows >= end\)",
        "row % kRows > end)",
        _TAIL,
    ),
    Planted(
        "fp8kv: rows are read while they are cleared",
        KERNEL,
        r"(  // they are loaded over\n)    __syncwarp\(\);",
        r"\1",
        _TAIL,
    ),
    Planted(
        "fp8kv: the power of two of another row",
        KERNEL,
        r"narrowed\[h\] = fmaxf",
        "narrowed[1 - h] = fmaxf",
        _HEADS.replace(pattern="outlier"),
    ),
    Planted(
        "fp8kv: queries of another step",
        KERNEL,
        r"held\[i\], \(at \^ i % 4 \* 32\)",
        "held[i], (at + i % 4 * 32)",
        _HEADS,
    ),
    Planted("fp8kv: nothing, with tiles that run again", KERNEL, "", "", _AGAIN),
    Planted(
        "fp8kv: tiles that run again have the queries of others",
        KERNEL,
        r"// Anew for each key tile[^\n]*\n +this->hold_queries\(\);",
        "",
        _AGAIN,
    ),
    Planted(
        # As ptxas of NVRTC 13.0 had it (docs/fp8_prefill.md).
        "fp8kv: weights in the registers of the queries of tiles that run again",
        KERNEL,
        r"(?s)// Anew for each key tile[^\n]*\n +(this->hold_queries\(\);)(.{1,700}?this->pack_weights\(\);)",
        r"if (n == t.n_end - 1) \1\2\n      for (int i = 0; i < 8; ++i) for (int j = 0; j < 4; ++j) this->held[i][j] = weight[i][j];",
        _AGAIN,
    ),
    Planted(
        "fp8kv: one key's factor for all heads",
        KERNEL,
        r"natural = fmaxf\(fabsf\(score_scale\(p, t\.request, t\.kv_head\)\)",
        "natural = fmaxf(fabsf(score_scale(p, t.request, 0))",
        _HEADS,
    ),
    Planted(
        "fp8kv: keys' factors are not those of the capped scores",
        KERNEL,
        r"if constexpr \(V::kWiden\) return natural;",
        "",
        _CAP,
    ),
    Planted(
        "fp8kv: values without their factor",
        KERNEL,
        r"if constexpr \(V::kWiden\) return value_scale\(p, t\.request, t\.kv_head\);",
        "",
        _HEADS,
    ),
    Planted(
        "fp8kv: panels swapped",
        KERNEL,
        r"to \+ panel / 2 \* 2 \* kPanelBytes",
        "to + (panel / 2 ^ 1) * 2 * kPanelBytes",
        _WIDE,
    ),
    Planted(
        "fp8kv: both halves of the columns have the first half's values",
        KERNEL,
        r"h \* S::kPanelsV / 2 \* kKeys \* 128 \+ i \* 2048",
        "i * 2048",
        _WIDEST,
    ),
    Planted(
        "fp8kv: the swizzle of one row for all",
        KERNEL,
        r"return row \* 128 \+ \(\(chunk \^ row\) << 4\);",
        "return row * 128 + (chunk << 4);",
        _TILES,
    ),
]
