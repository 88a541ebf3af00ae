"""Property-test an attention function of your own with `cupyflash.testing`.

The engine below gathers pages and attends in float32. It is right; then a bug is planted, and
hypothesis finds it and shrinks it to the smallest batch that shows it.

Needs hypothesis: pip install cupyflash[test]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cupyflash.testing import Case
from cupyflash.testing.strategies import cases


def my_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens_q: np.ndarray,
    seqused_k: np.ndarray,
    block_table: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    bug: bool = False,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention over a paged cache, one request and one head at a time."""
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    for request, kv_len in enumerate(seqused_k):
        rows = slice(cu_seqlens_q[request], cu_seqlens_q[request + 1])
        token = np.arange(kv_len)
        slots = (block_table[request, token // page], token % page)
        position = np.arange(rows.stop - rows.start) + kv_len - (rows.stop - rows.start)
        for head in range(q.shape[1]):
            keys, values = (c[slots][:, head // group].astype(np.float32) for c in (k, v))
            score = q[rows, head].astype(np.float32) @ keys.T * np.float32(q.shape[2] ** -0.5)
            seen = token < position[:, None] if bug else token <= position[:, None]
            score = np.where(seen, score, np.float32(-np.inf))
            top = np.max(score, axis=1, initial=-1e30, keepdims=True)
            weight = np.exp(score - top)
            total = weight.sum(axis=1, keepdims=True)
            empty = total == 0
            safe = np.where(empty, np.float32(1), total)
            out[rows, head] = np.where(empty, 0, weight @ values / safe)
            lse[head, rows] = np.where(empty, -np.inf, top + np.log(safe))[:, 0]
    return out, lse


BATCHES = cases(
    page_size=st.sampled_from([16, 1, 64]),
    causal=True,
    window_size=(-1, -1),
    softcap=0.0,
    softmax_scale=None,
    alibi="",
    sink=False,
    q_type="bf16",
    kv_type="bf16",
)


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def my_engine_is_right(case: Case) -> None:
    case.make().check(my_attention)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),
)
@given(BATCHES)
def my_engine_with_a_bug_is_right(case: Case) -> None:
    case.make().check(my_attention, bug=True)


if __name__ == "__main__":
    my_engine_is_right()
    print("60 random batches are within the bound.")
    try:
        my_engine_with_a_bug_is_right()
    except AssertionError as failure:
        print("Causal mask off by one, shrunk by hypothesis:")
        print(f"  {failure}")
        print("\n".join(f"  {note}" for note in getattr(failure, "__notes__", [])))
    else:
        raise SystemExit("the planted bug was not found")
