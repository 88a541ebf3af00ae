"""Bugs planted in the portable attention kernels; see planted.py."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from cupyflash.testing import Case

from .planted import Planted

__all__ = ["PLANTED_SM80"]

FORWARD, COMBINE = "attention_fwd_sm80.cu", "attention_combine.cu"
DECODE = "attention_decode_sm80.cu"
_TILES = Case(lengths=((40, 200),), num_heads_kv=1, group_size=2, head_dim=64, causal=True, page_size=16,
              q_type="fp16", kv_type="fp16")  # fmt: skip
_LARGE = Case(lengths=((20, 90),), num_heads_kv=1, group_size=2, head_dim=192, causal=True,
              q_type="fp16", kv_type="fp16")  # fmt: skip
_STEP = Case(lengths=((1, 400), (1, 90)), num_heads_kv=2, group_size=2, head_dim=64, page_size=16,
             q_type="bf16", kv_type="bf16")  # fmt: skip
_SPLIT = _TILES.replace(lengths=((20, 900),))
_MIXED = _STEP.replace(lengths=((1, 300), (40, 300), (1, 90), (33, 0)), causal=True)


def _bug(name: str, source: str, pattern: str, replacement: str, case: Case) -> Planted:
    return Planted(name, source, pattern, replacement, case, version=2)


_WAIT = r"cp_async_wait<kAhead - 1>\(\);"

PLANTED_SM80 = [
    _bug("tiles: nothing", FORWARD, "", "", _TILES),
    _bug("large heads: nothing", FORWARD, "", "", _LARGE),
    _bug("decoding: nothing", DECODE, "", "", _STEP),
    _bug("both: nothing", FORWARD, "", "", _MIXED),
    _bug("no wait for a tile", FORWARD, _WAIT, "", _TILES),
    _bug("no barrier of a tile", FORWARD, _WAIT + r"\s*__syncthreads\(\);", "cp_async_wait<kAhead - 1>();", _TILES),
    _bug("no wait for values", FORWARD, r"(state, scores\);\s*)cp_async_wait<0>\(\);", r"\1", _LARGE),
    _bug("no barrier before keys are overwritten", FORWARD, r"(state, scores\);\s*cp_async_wait<0>\(\);)\s*__syncthreads\(\);", r"\1", _LARGE),
    _bug("no barrier after a list", FORWARD, r"(copy\.write_list\(begin \+ i, at\[i\]\);)\s*__syncthreads\(\);", r"\1", _TILES),
    _bug("copied to the place that is read", FORWARD, r"issue\(tile \+ kAhead, free\);", "issue(tile + kAhead, stage);", _TILES),
    _bug("the last key counts for nothing", FORWARD, r">= high\) score", ">= high - 1) score", _TILES),
    _bug("one key too many is seen", FORWARD, r">= high\) score", "> high) score", _TILES),
    _bug("table read past the last key", DECODE, r"key < s\.kv_begin \|\| key >= s\.kv_end\) return nullptr;", "key < s.kv_begin) return nullptr;", _STEP),
    _bug("rows past the last are copied", FORWARD, r"rows\[min\(row, rows\.count - 1\)\]\),\s*read && row < rows\.count \? 16 : 0", "rows[row]), read ? 16 : 0", _TILES.replace(lengths=((37, 50),))),
    _bug("head of the first row forgotten", FORWARD, r"const u32 at = head \+ row,", "const u32 at = row,", _TILES.replace(group_size=3, lengths=((50, 20),))),
    _bug("results staged before queries are read", FORWARD, r"__syncwarp\(\);  // all its queries have been read", "", _TILES.replace(head_dim=96, lengths=((70, 10),))),
    _bug("staged results read too soon", FORWARD, r"__syncwarp\(\);(\s*constexpr int kLanes = kQueryLanes<kDv>;)", r"\1", _TILES),
    _bug("rows past the last are stored", FORWARD, r"if \(row < rows\.count\) \{", "{", _TILES.replace(lengths=((37, 50), (3, 9)))),
    _bug("warps merged before all have stored", DECODE, r"(sums_at\[warp \* 16 \+ h \* 8 \+ lane / 4\] = sum\[h\];\s*\}\s*\})\s*__syncthreads\(\);", r"\1", _STEP),
    _bug("warps store over tiles that are read", DECODE, r"cp_async_wait<0>\(\);\s*__syncthreads\(\);(\s*#pragma unroll\s*for \(int n = 0; n < kOutTiles; \+\+n\) \{\s*#pragma unroll\s*for \(int e = 0; e < 4; \+\+e\) \{\s*values_at)", r"\1", _STEP),
    _bug("spans: lengths overwritten before the first tile is found", DECODE, r"__syncthreads\(\);(\s*#pragma unroll 1\s*while \(true\))", r"\1", _STEP),
    _bug("spans: the walk goes on while it is read", DECODE, r"__syncwarp\(\);  // all lanes have read where they were", "", _STEP),
    _bug("spans: a piece counted before it is stored", DECODE, r"(\.run\(\);\s*)__syncthreads\(\);", r"\1", _STEP),
    _bug("spans: the next piece begun while one is merged", DECODE, r"(if \(at >= walk\.end\) return;\s*)__syncthreads\(\);", r"\1", _STEP.replace(lengths=((1, 300), (1, 90)))),
    _bug("spans: a piece taken for a whole segment", DECODE, r"piece\.whole\(\) \? -1", "piece.end == piece.last ? -1", _STEP),
    _bug("spans: a part in the slot of another", DECODE, r"\(piece\.start == piece\.first\);", "1;", _STEP),
    _bug("spans: keys of the segment's beginning", DECODE, r"\(piece\.start - piece\.first\) <<", "(0) <<", _STEP),
    _bug("spans: requests without keys not passed over", DECODE, r"request = next_request\(p, d, request \+ 1\)", "++request", _STEP.replace(lengths=((1, 800), (1, -1), (1, 300)), num_heads_kv=1)),
    _bug("spans: rows without keys not written", DECODE, r"if \(w\.segments\) write_nothing\(w\.request\);", "", _STEP.replace(lengths=((1, 130), (1, -1), (1, 400)))),
    _bug("spans: the first state of a row is another row's", DECODE, r"s\.slot\) \* p\.row_block \+ in_block", "s.slot) * p.row_block + 0", _STEP),
    _bug("merge: nothing", COMBINE, "", "", _SPLIT),
    _bug("merge: a part too few", COMBINE, r"part < chunks && column", "part < chunks - 1 && column", _SPLIT),
    _bug("merge: a part too many", COMBINE, r"part < chunks \? p\.partial_lse", "part <= chunks ? p.partial_lse", _SPLIT),
    _bug("merge: sums of warps read too soon", COMBINE, r"__syncthreads\(\);(\s*#pragma unroll 1\s*for \(int column)", r"\1", _SPLIT),
]  # fmt: skip
