"""Schedules: what they are for, how they are checked, where they are written."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from test_problem import paged

import cupyflash
from cupyflash.scheduler_metadata import HEADER


def schedule(**changes):
    arguments = {
        "batch_size": 2, "max_seqlen_q": 3, "max_seqlen_k": 20, "num_heads_q": 6,
        "num_heads_kv": 2, "headdim": 64, "cache_seqlens": np.array([20, 9], np.int32),
        "qkv_dtype": "float16", "cu_seqlens_q": np.array([0, 1, 4], np.int32), "page_size": 16,
        "causal": True, **changes,
    }  # fmt: skip
    return cupyflash.get_scheduler_metadata(**arguments)


def attend(metadata, **changes):
    return cupyflash.flash_attn_varlen_func(
        **{**paged(), "causal": True, "scheduler_metadata": metadata, **changes}
    )


def test_a_schedule_serves_the_calls_it_was_made_for():
    metadata = schedule()
    right = cupyflash.flash_attn_varlen_func(**paged(), causal=True)
    for given in (metadata, metadata.buffer):
        np.testing.assert_array_equal(attend(given), right)
    attend(metadata, window_size=(-1, 3))
    attend(schedule(window_size=None))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_seqlen_q": 4}, r"max_seqlen_q=3 \(the call has 4\)"),
        ({"max_seqlen_k": 21}, r"max_seqlen_k=20 \(the call has 21\)"),
        ({"causal": False}, r"window_right=0 \(the call has -1\)"),
        ({"window_size": (5, 0)}, r"window_left=-1 \(the call has 5\)"),
        ({"softcap": 3.0}, r"has_softcap=False \(the call has True\)"),
        ({"num_splits": 2}, r"num_splits=0 \(the call has 2\)"),
    ],
)
def test_another_call_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        attend(schedule(), **change)
    with pytest.raises(ValueError, match="header of scheduler_metadata says"):
        attend(schedule().buffer, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads_q": 2}, "num_heads_q=2"),
        ({"headdim_v": 32}, "head_dim_v=32"),
        ({"qkv_dtype": "fp8"}, r"kv_type=e4m3 \(the call has fp16\)"),
        ({"page_size": None}, "page_size=None"),
        ({"batch_size": 1, "cache_seqlens": np.array([20], np.int32), "cu_seqlens_q": None},
         r"batch=1 \(the call has 2\)"),
    ],
)  # fmt: skip
def test_another_schedule_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        attend(schedule(**change))


def test_buffers_are_written_in_place_with_a_zeroed_tail():
    out = np.full(40, -1, np.int32)
    metadata = schedule(out=out)
    assert metadata.buffer is out
    assert tuple(out[:2]) == metadata.parameter_hash
    assert (out[HEADER:] == 0).all()
    attend(out)
    attend(out[:HEADER])


def test_the_hash_is_the_same_in_every_process():
    code = "import sys; sys.path[:0] = ['tests', '.']; import test_scheduler_metadata as t; "
    code += "print(*t.schedule().parameter_hash)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(n) for n in schedule().parameter_hash]
    assert schedule().parameter_hash != schedule(causal=False).parameter_hash


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cache_seqlens": np.array([1, 2])}, TypeError, "cache_seqlens is int64"),
        ({"cache_seqlens": None}, TypeError, "cache_seqlens is None"),
        ({"cache_seqlens": np.array([1], np.int32)}, ValueError, r"it must be \[2\]"),
        ({"cu_seqlens_q": np.array([0, 1], np.int32)}, ValueError, r"it must be \[3\]"),
        ({"num_heads_q": 5}, ValueError, "5 query heads and 2 KV heads"),
        ({"headdim": 20}, ValueError, "the nearest is 24"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k=-1"),
        ({"page_size": 0}, ValueError, "page_size=0"),
        ({"window_size": (-4, 0)}, ValueError, "window_size"),
        ({"qkv_dtype": "int8"}, ValueError, "qkv_dtype='int8' is not a known type"),
        ({"has_softcap": 15.0}, TypeError, "has_softcap is float"),
        ({"out": np.zeros(3, np.int32)}, ValueError, r"int32 \[at least 4\]"),
        ({"out": np.zeros(8, np.int64)}, ValueError, "out is int64"),
    ],
)
def test_bad_bounds_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        schedule(**change)


@pytest.mark.parametrize("what", [7, np.zeros(8), np.zeros((2, 8), np.int32)])
def test_other_things_are_no_schedule(what):
    with pytest.raises(TypeError, match="scheduler_metadata"):
        attend(what)
