"""The rule of `use_cascade_attention`, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import use_cascade_attention

USUAL = {
    "common_prefix_len": 2048,
    "query_lens": [1] * 64,
    "num_query_heads": 32,
    "num_kv_heads": 8,
    "use_alibi": False,
    "use_sliding_window": False,
    "use_local_attention": False,
    "num_sms": 132,
    "dcp_world_size": 1,
}


def decision(**changes):
    return use_cascade_attention(**{**USUAL, **changes})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"common_prefix_len": 255}, False),
        ({"query_lens": [1] * 7}, False),
        ({"use_alibi": True}, False),
        ({"use_sliding_window": True}, False),
        ({"use_local_attention": True}, False),
        ({"dcp_world_size": 2}, False),
        # No split decode to compare with: prefill, a mixed batch, heads without groups.
        ({"query_lens": [5] * 8, "common_prefix_len": 256, "num_sms": 1}, True),
        ({"query_lens": [1] * 7 + [2], "common_prefix_len": 256, "num_sms": 10**6}, True),
        ({"num_query_heads": 8, "query_lens": [1] * 8, "common_prefix_len": 256}, True),
        # 256 tokens are 2 tiles: cascade ceil(32/132)*2 = 2, decode ceil(8*8*2/132) = 1.
        ({"query_lens": [1] * 8, "common_prefix_len": 256}, False),
        # 33 requests: decode ceil(33*8*2/132) = 4 > 2.
        ({"query_lens": [1] * 33, "common_prefix_len": 256}, True),
        # 17 requests: decode ceil(17*8*2/132) = 3 > 2; 16: 2, and a tie is no gain.
        ({"query_lens": [1] * 17, "common_prefix_len": 256}, True),
        ({"query_lens": [1] * 16, "common_prefix_len": 256}, False),
    ],
)
def test_rule(change, expected):
    assert decision(**change) is expected


@given(
    prefix=st.integers(256, 20000), requests=st.integers(8, 400), kv_heads=st.integers(1, 16),
    group=st.integers(2, 16), num_sms=st.integers(1, 200),
)  # fmt: skip
def test_decode_compares_waves(prefix, requests, kv_heads, group, num_sms):
    tiles = math.ceil(prefix / 128)
    cascade = math.ceil(group * kv_heads * math.ceil(requests / 128) / num_sms) * tiles
    decode = math.ceil(requests * kv_heads * math.ceil(group / 128) * tiles / num_sms)
    found = decision(
        common_prefix_len=prefix, query_lens=np.ones(requests, np.int32),
        num_query_heads=group * kv_heads, num_kv_heads=kv_heads, num_sms=num_sms,
    )  # fmt: skip
    assert found == (cascade < decode)
