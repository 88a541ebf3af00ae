"""Bugs planted in what the warps of the 16-bit Hopper prefill hand to each other."""

from __future__ import annotations

from cupyflash.testing import Case

from .planted import PREFILL, Planted

__all__ = ["PLANTED_PREFILL"]

_TILES = Case(lengths=((300, 200),), num_heads_kv=2, group_size=2, head_dim=64, causal=True,
              q_type="bf16", kv_type="bf16")  # fmt: skip
_TAIL = _TILES.replace(lengths=((140, 60), (40, 0), (70, 3)))  # tiles with rows of others
_AGAIN = Case(lengths=((1, 0), (1, 0), (17, 255)), num_heads_kv=2, group_size=8, q_type="bf16",
              kv_type="bf16", head_dim=64, head_dim_v=128, pattern="spiky", seed=2556)  # fmt: skip
_ONE_BUFFER = _TILES.replace(head_dim=256)
_MANY = _TILES.replace(lengths=((140, 60),) * 8, group_size=1, head_dim=128)
_EARLY = _TILES.replace(head_dim=128)
_WINDOW = _TILES.replace(window_size=(90, 0), causal=False)

PLANTED_PREFILL = [
    Planted("handed over: nothing", PREFILL, "", "", _TILES),
    Planted("handed over: nothing, with tails", PREFILL, "", "", _TAIL),
    Planted(
        "handed over: a tile before it is described",
        PREFILL,
        r"mbarrier_wait\(shared_address\(&shared\.rest\(\)\.tile_full\[slot\]\)[^;]*;",
        ";",
        _TILES,
    ),
    Planted(
        "handed over: results before they are there",
        PREFILL,
        r"mbarrier_wait\(shared_address\(&r\.staged\[q\.slot\]\), q\.parity\);",
        ";",
        _TILES,
    ),
    Planted(
        "handed over: results of one warp are enough",
        PREFILL,
        r"(&r\.staged\[i\]\)), kComputeWarps\)",
        r"\1, 1)",
        _TILES,
    ),
    Planted(
        "handed over: results without a proxy fence",
        PREFILL,
        r"fence_async_proxy\(\);(\s+return fmaf)",
        r"\1",
        _TILES,
    ),
    Planted(
        "handed over: a buffer whose results are still read",
        PREFILL,
        r"cp\.async\.bulk\.wait_group\.read 0;",
        "",
        _TILES,
    ),
    Planted(
        "handed over: queries over results",
        PREFILL,
        r"mbarrier_wait\(shared_address\(&r\.query_empty\[slot\]\), ~round & 1\);",
        ";",
        _TILES,
    ),
    Planted(
        "handed over: a message in the place of one that is still read",
        PREFILL,
        r"mbarrier_wait\(shared_address\(&r\.drained\), 0\);",
        ";",
        _AGAIN,
    ),
    Planted(
        "passed over: keys that are never given back",
        PREFILL,
        r"(end_turn\(\);\s+)release\(shared\.rest\(\)\.key_empty\[k\.slot\]\);",
        r"\1",
        _ONE_BUFFER,
    ),
    Planted(
        "passed over: values of a key tile too few",
        PREFILL,
        r"(void pass_values\(int count\) \{\s+#pragma unroll 1\s+for \(; count >) 0",
        r"\1 1",
        _ONE_BUFFER,
    ),
    Planted(
        "passed over: a key tile too many",
        PREFILL,
        r"\(keys \+ kKeys - 1\) / kKeys\)\)",
        "keys / kKeys))",
        _ONE_BUFFER,
    ),
    Planted(
        "passed over: no turn is taken for it",
        PREFILL,
        r"begin_turn\(\);\s+end_turn\(\);(\s+release)",
        r"\1",
        _ONE_BUFFER,
        always=False,
    ),
    Planted(
        "walked: the first of the last pairs by itself",
        PREFILL,
        r"first >= x\.lead",
        "first > x.lead",
        _MANY,
        num_sms=8,
    ),
    Planted(
        "staged: results without the swizzle",
        PREFILL,
        r"\(matrix / 2 \^ row\)",
        "(matrix / 2)",
        _TILES,
    ),
    Planted(
        "staged: rows of the next request",
        PREFILL,
        r"first \+ tokens <= r\.q_len",
        "first < r.q_len",
        _TAIL,
    ),
    Planted(
        "masked: one key too few by the window",
        PREFILL,
        r"~bits_before\(low - column",
        "~bits_before(low + 1 - column",
        _WINDOW,
    ),
    Planted(
        "masked: both keys of a pair or none",
        PREFILL,
        r"min\(end & 7, 2\)",
        "(end & 6 ? 2 : 0)",
        _TILES,
    ),
    Planted(
        "concluded early: results without a proxy fence",
        PREFILL,
        r"fence_async_proxy\(\);(\s+return last)",
        r"\1",
        _EARLY,
    ),
    Planted(
        "concluded early: results without what they are due",
        PREFILL,
        r"last\.norm\[h\] = to",
        "last.norm[h] = 1.f + 0.f * to",
        _EARLY,
    ),
    Planted(
        "concluded early: the sums of the next tile",
        PREFILL,
        r"finish_tile\(t, slot, last\);",
        "last = conclude(t, slot); finish_tile(t, slot, last);",
        _EARLY,
    ),
]
