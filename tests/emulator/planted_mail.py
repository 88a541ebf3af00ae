"""Bugs planted where decode merges equal segments by mail, and where it finds them early."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from cupyflash.testing import Case

from .planted import DECODE, Planted

__all__ = ["PLANTED_MAIL"]

_EVEN = Case(lengths=((1, 500),) * 4, num_heads_kv=2, group_size=2, head_dim=64, page_size=16,
             causal=True, q_type="bf16", kv_type="bf16")  # fmt: skip
_MANY = _EVEN.replace(lengths=((1, 2300),), num_heads_kv=5)  # parts for whole blocks
_ALIKE = _EVEN.replace(page_size=24)  # found as any other batch is
_UNLIKE = _EVEN.replace(lengths=((1, 500), (1, 500), (1, 500), (1, 700)))

PLANTED_MAIL = [
    Planted("mail: nothing", DECODE, "", "", _EVEN, num_sms=16, calls=2),
    Planted("mail: nothing, many parts", DECODE, "", "", _MANY, num_sms=43, calls=2),
    Planted("mail: nothing, found late", DECODE, "", "", _ALIKE, num_sms=16, calls=2),
    Planted("mail: nothing, one request longer", DECODE, "", "", _UNLIKE, num_sms=16),
    Planted("mail: not cleared", DECODE, r"store_relaxed\(values_at\(base \+[^;]*;", ";", _EVEN, num_sms=16, calls=2),
    Planted("mail: not cleared, many parts", DECODE, r"store_relaxed\(values_at\(base \+[^;]*;", ";", _MANY, num_sms=43, calls=2),
    Planted("mail: states not cleared", DECODE, r"store_relaxed\(state_at\(base \+[^;]*;", ";", _EVEN, num_sms=16, calls=2),
    Planted("mail: values not waited for", DECODE, r"missing \|= v\[i\][^;]*;", ";", _EVEN, num_sms=16, calls=4, always=False),
    Planted("mail: without order", DECODE, r"st\.relaxed\.gpu\.global\.v4", "st.global.v4", _EVEN, num_sms=16),
    Planted("mail: a part left out", DECODE, r"at \+ i \* groups >= count\) state", "at + i * groups >= count - 1) state", _EVEN, num_sms=16),
    Planted("mail: warps of a block not waited for", DECODE, r"__syncthreads\(\);(\s*if \(warp == 0\) add_warps)", r"\1", _MANY, num_sms=43),
    Planted("mail: values of warps not waited for", DECODE, r"__syncthreads\(\);(  // what lay there)", r"\1", _MANY, num_sms=43),
    Planted("mail: a task too few", DECODE, r"task < rows << slices_shift", "task + 1 < rows << slices_shift", _EVEN, num_sms=16),
    Planted("even: lengths are not compared", DECODE, r"alike &= w\.tiles == tiles[^;]*;", ";", _UNLIKE, num_sms=16),
    Planted("even: the longer pieces are as the others", DECODE, r"share \+ \(part < rest \? 1 : 0\);\s*if \(index", "share; if (index", _MANY, num_sms=43),
    Planted("even: the next request's length", DECODE, r"mine\.kv_len, own\)", "mine.kv_len, own + 1)", _EVEN.replace(lengths=((1, 500), (1, 497)) * 2), num_sms=16),
]  # fmt: skip
