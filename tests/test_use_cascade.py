"""The rule of `use_cascade_attention`, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import shared_prefix_pays, use_cascade_attention
from cupyflash.cascade_policy import predict_microseconds

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


@pytest.mark.parametrize(
    ("requests", "prefix", "own", "pays"),
    [
        (64, 8192, 256, True), (256, 4096, 512, True), (16, 32768, 128, True), (8, 8192, 16, True),
        (64, 0, 256, False), (1, 8192, 16, False), (128, 128, 1024, False), (8, 128, 16, False),
        (8, 1024, 1024, False), (0, 1024, 0, False),
    ],
)  # fmt: skip
def test_when_a_shared_prefix_was_faster(requests, prefix, own, pays):
    """Runs on an H200: what was within 5 % or 2 microseconds is not shared."""
    lengths = [1] * requests, [prefix + own] * requests
    assert shared_prefix_pays(prefix, *lengths, 32, 8, 128) is pays


@pytest.mark.parametrize(
    ("requests", "prefix", "own", "pays"),
    [
        (64, 8192, 256, True), (256, 4096, 512, True), (16, 32768, 128, True),
        (8, 2048, 512, False), (64, 0, 256, False), (1, 8192, 16, False),
    ],
)  # fmt: skip
def test_when_a_shared_prefix_of_an_8_bit_cache_was_faster(requests, prefix, own, pays):
    lengths = [1] * requests, [prefix + own] * requests
    assert shared_prefix_pays(prefix, *lengths, 32, 8, 128, cache_itemsize=1) is pays


def test_a_schedule_for_each_call_has_to_be_won_back():
    lengths = [1] * 8, [8192 + 16] * 8
    alone, once = predict_microseconds(8192, *lengths, 32, 8, 128)
    _, each = predict_microseconds(8192, *lengths, 32, 8, 128, scheduled=False)
    assert once < each
    assert once < alone
