"""`warmup` and `workspace_size`: what is done ahead, and from which bounds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from test_problem import paged

import cupyflash
from cupyflash.attention import describe_call
from cupyflash.bounds import AttentionBounds
from cupyflash.runtime.device import DeviceInfo, use_device

BOUNDS = AttentionBounds(
    batch_size=2, max_seqlen_q=3, max_seqlen_k=20, num_heads_q=6, num_heads_kv=2, headdim=64,
    total_q=4, dtype="float16", page_size=16, max_blocks=3,
)  # fmt: skip


class Recorder:
    """A device that remembers what it was asked to compile."""

    info = DeviceInfo("a GPU", 0, (9, 0), 132, 232448)

    def __init__(self):
        self.symbols, self.kernels, self.bytes = [], {}, 0

    def compile(self, variant):
        self.symbols.append(variant.symbol)
        return SimpleNamespace()

    def is_capturing(self, stream):
        return False

    def current_stream(self):
        return 0

    def empty(self, shape, dtype, stream):
        self.bytes += shape[0]
        return np.empty(shape, dtype)


def test_the_problem_of_the_bounds_is_that_of_the_call():
    assert BOUNDS.problem() == describe_call(**paged()).problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads_q": 5}, "5 query heads and 2 KV heads"),
        ({"headdim": 20}, "the nearest is 24"),
        ({"max_seqlen_k": -1}, "max_seqlen_k=-1"),
        ({"page_size": 0}, "page_size=0"),
        ({"window_size": (-3, 0)}, "window_size"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"kv_dtype": "fp4"}, "kv_dtype='fp4'"),
    ],
)
def test_bounds_that_no_call_could_have_are_refused(change, words):
    given = {name: getattr(BOUNDS, name) for name in BOUNDS.__dataclass_fields__}
    with pytest.raises(ValueError, match=words):
        AttentionBounds(**{**given, **change}).problem()


def test_without_a_gpu_there_is_nothing_to_do(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cupyflash.workspace_size(BOUNDS) == 0
    assert cupyflash.warmup(BOUNDS) is None


def test_attention_merge_and_write_are_compiled_ahead():
    device = Recorder()
    with use_device(device):
        cupyflash.warmup(BOUNDS)
    families = {symbol.rsplit("_", 2)[0] for symbol in device.symbols}
    assert "merge_attn_states_fp16_fp16" in device.symbols
    assert "reshape_and_cache_fp16_fp16" in device.symbols
    assert any("attention" in name for name in families)


def test_workspace_is_what_the_plans_need():
    long = {name: getattr(BOUNDS, name) for name in BOUNDS.__dataclass_fields__}
    long.update(max_seqlen_k=1 << 17, max_blocks=1 << 13)
    with use_device(Recorder()) as device:
        nbytes = cupyflash.workspace_size(AttentionBounds(**long))
        cupyflash.warmup(AttentionBounds(**long))
    assert nbytes > 0
    assert device.bytes >= nbytes
