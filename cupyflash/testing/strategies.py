"""Hypothesis strategies for ragged batches (extra ``test``)."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .case import Case
from .patterns import PATTERNS
from .poison import LAYOUTS

__all__ = ["cases", "lengths"]

_BORDERS = (16, 32, 64, 128, 256)
_TYPES = (
    *(("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")),
    *(("bf16", "e4m3"), ("fp16", "e5m2"), ("e4m3", "e4m3")),
)


def _length(largest: int) -> st.SearchStrategy[int]:
    """Small numbers, and numbers around the borders of tiles and pages."""
    near = [n + d for n in _BORDERS for d in (-1, 0, 1) if n + d <= largest]
    small = st.integers(0, min(9, largest))
    return st.one_of(small, st.sampled_from(near)) if near else small


def lengths(
    max_requests: int = 4, max_q: int = 70, max_context: int = 300
) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """One list of (q_len, context_len): it shrinks better than a batch size and two lists.

    A query length of 1 (decode) is as likely as all others together, and one context in eight is
    negative: fewer keys than queries.
    """
    q_len = st.one_of(st.just(1), _length(max_q))
    context = st.one_of(*[_length(max_context)] * 7, st.integers(-5, -1))
    return st.lists(st.tuples(q_len, context), min_size=1, max_size=max_requests).map(tuple)


def cases(**fixed: Any) -> st.SearchStrategy[Case]:
    """Any `Case`; keyword arguments fix a field or replace its strategy.

    Masks, soft cap, ALiBi and sinks are drawn together, since that is where options fail. The
    simplest value of every field comes first, so that failures shrink to it.

    Examples
    --------
    >>> decode = cases(page_size=16, q_type="bf16", kv_type=st.sampled_from(["bf16", "e4m3"]))
    """
    window = st.one_of(st.just(-1), st.integers(0, 8), st.sampled_from([15, 16, 63, 127, 300]))
    strategies: dict[str, Any] = {
        "lengths": lengths(),
        "num_heads_kv": st.sampled_from([1, 2, 3]),
        "group_size": st.sampled_from([1, 2, 3, 8]),
        "head_dim": st.sampled_from([64, 32, 80, 128]),
        "page_size": st.sampled_from([None, 16, 1, 4, 64]),
        "causal": st.booleans(),
        "window_size": st.one_of(st.just((-1, -1)), st.tuples(window, window)),
        "softcap": st.sampled_from([0.0, 0.0, 1.0, 30.0]),
        "softmax_scale": st.sampled_from([None, 0.05, 1.0]),
        "alibi": st.sampled_from(["", "", "head", "request"]),
        "sink": st.booleans(),
        "layout": st.sampled_from(LAYOUTS),
        "pattern": st.sampled_from(PATTERNS),
        "seed": st.integers(0, 2**16),
    }
    for name, value in fixed.items():
        strategies[name] = value if isinstance(value, st.SearchStrategy) else st.just(value)
    types = st.sampled_from(_TYPES)
    return st.tuples(types, st.booleans(), st.fixed_dictionaries(strategies)).map(_case)


def _case(drawn: tuple[tuple[str, str], bool, dict[str, Any]]) -> Case:
    (q_type, kv_type), descale, fields = drawn
    fields = {"q_type": q_type, "kv_type": kv_type, **fields}
    fields.setdefault("descale", descale and fields["kv_type"] in ("e4m3", "e5m2"))
    return Case(**fields)
