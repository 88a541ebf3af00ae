"""``CUPYFLASH_CHECK=1``: lengths, tables and slots of a GPU's arrays are read and checked."""

from __future__ import annotations

import numpy as np
import pytest
from test_fa_version import gpu
from test_problem import paged

import cupyflash
from cupyflash.attention import describe_call
from cupyflash.values import check_slot_values, check_values

PACKED = {
    "k": np.zeros((29, 2, 64), np.float16), "v": np.zeros((29, 2, 64), np.float16),
    "seqused_k": None, "block_table": None, "cu_seqlens_k": np.array([0, 20, 29], np.int32),
}  # fmt: skip


def table(*entries):
    found = np.zeros((2, 3), np.int32)
    found.reshape(-1)[: len(entries)] = entries
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": np.array([0, 3, 2], "i4")}, "cu_seqlens_q.* must not fall"),
        ({"cu_seqlens_q": np.array([-1, 3, 4], "i4")}, "must not be negative"),
        ({"cu_seqlens_q": np.array([0, 3, 5], "i4")}, "at most at 4, the rows of q"),
        ({"seqused_k": np.array([20, -1], "i4")}, r"seqused_k\[1\]=-1 must lie in 0..48"),
        ({"seqused_k": np.array([49, 1], "i4"), "max_seqlen_k": 99}, r"seqused_k\[0\]=49"),
        ({"block_table": table(0, 5)}, r"block_table\[0, 1\]=5 .* must lie in 0..4"),
        ({"block_table": table(0, 0, 0, -1)}, r"block_table\[1, 0\]=-1"),
        ({"max_seqlen_q": 2}, "max_seqlen_q=2, but request 1 has 3"),
        ({"max_seqlen_k": 19}, "max_seqlen_k=19, but request 0 has 20"),
        ({**PACKED, "cu_seqlens_k": np.array([0, 20, 30], "i4")}, "at most at 29, the rows of k"),
        (
            {**PACKED, "seqused_k": np.array([21, 9], "i4"), "max_seqlen_k": 21},
            r"seqused_k\[0\]=21",
        ),
    ],
)
def test_wrong_values_are_named(change, words):
    with gpu((9, 0)):
        call = describe_call(**{**paged(), **change})
    assert not call.on_host
    with pytest.raises(ValueError, match=words):
        check_values(call)


def test_right_values_pass():
    with gpu((9, 0)):
        check_values(describe_call(**paged()))
        check_values(describe_call(**{**paged(), **PACKED}))
        check_values(describe_call(**paged((0, 3), (9, 0)), window_size=(4, 0)))
        unused = table(0, 1, 2**31 - 1, 4, 2**31 - 1, -7)
        check_values(describe_call(**{**paged(), "block_table": unused}))


def test_calls_are_checked_only_if_asked(monkeypatch):
    args = {**paged(), "max_seqlen_q": 2}
    with gpu((7, 5)), pytest.raises(NotImplementedError, match=r"7\.5"):
        cupyflash.flash_attn_varlen_func(**args)
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    with gpu((7, 5)), pytest.raises(ValueError, match="max_seqlen_q=2"):
        cupyflash.flash_attn_varlen_func(**args)


class OnDevice:
    """An array that must be fetched."""

    def __init__(self, array):
        self.array = array

    def get(self):
        return self.array


def test_slots_past_the_end_are_named():
    check_slot_values(OnDevice(np.array([-4294967295, 5, 63])), 4, 16)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\]=64 must be less than 64"):
        check_slot_values(OnDevice(np.array([-1, 64], np.int32)), 4, 16)
