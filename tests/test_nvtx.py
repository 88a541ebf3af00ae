"""Calls are marked for profilers under CUPYFLASH_DEBUG, and only then."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import emulated

import cupyflash as cf
from cupyflash.runtime import nvtx


@pytest.fixture
def pushed(monkeypatch):
    """Texts of ranges, and None where one ends."""
    found = []
    recorder = SimpleNamespace(RangePush=found.append, RangePop=lambda: found.append(None))
    fake = SimpleNamespace(cuda=SimpleNamespace(nvtx=recorder))
    monkeypatch.setattr(nvtx, "load_cupy", lambda: fake)
    return found


def calls():
    q = np.ones((2, 1, 64), np.float16)
    starts, lse = np.array([0, 2], np.int32), np.zeros((1, 2), np.float32)
    with emulated("sm_80"):
        cf.flash_attn_varlen_func(q, q, q, 2, starts, 2, starts)
        cf.merge_attn_states(q.copy(), q, lse, q, lse)
        cache = np.zeros((2, 1, 4, 1, 64), np.float16)
        cf.reshape_and_cache_flash(q, q, *cache, np.array([0, 1]), "auto", 1.0, 1.0)


def test_ranges_of_every_operation(pushed, monkeypatch):
    calls()
    assert pushed == []
    monkeypatch.setenv("CUPYFLASH_DEBUG", "1")
    calls()
    assert pushed == [
        "cupyflash: attention v2, 1 requests, q 2, k 2", None,
        "cupyflash: merge_attn_states, 2 tokens", None,
        "cupyflash: reshape_and_cache_flash, 2 slots", None,
    ]  # fmt: skip


def test_a_range_ends_with_an_error(pushed):
    with pytest.raises(ValueError, match="no"), nvtx.call_range("x"):
        raise ValueError("no")
    assert pushed == ["cupyflash: x", None]


def test_without_cupy_there_are_no_ranges(monkeypatch):
    def missing():
        raise ImportError

    monkeypatch.setattr(nvtx, "load_cupy", missing)
    with nvtx.call_range("x"):
        pass
