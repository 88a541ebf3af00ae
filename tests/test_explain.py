"""What `explain` counts, says and does not do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fa_version import gpu
from test_problem import paged

import cupyflash
from cupyflash import Explanation, explain
from cupyflash.explain import _lengths
from cupyflash.runtime.arrays import AttentionArrays
from cupyflash.runtime.device import DeviceInfo
from cupyflash.testing import visible


def counted(q_lens, kv_lens, causal, window):
    """Pairs and keys that are seen, one request at a time."""
    masks = [visible(q, k, causal, window) for q, k in zip(q_lens, kv_lens, strict=True)]
    pairs = sum(int(mask.sum()) for mask in masks)
    spans = []
    for mask in masks:
        seen = np.flatnonzero(mask.any(axis=0))
        spans.append(seen[-1] - seen[0] + 1 if len(seen) else 0)
    return pairs, sum(spans)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 12), st.integers(-1, 12)),
)
def test_flops_and_bytes_are_those_of_the_mask(lengths, causal, window):
    q_lens, kv_lens = zip(*lengths, strict=True)
    args = paged(q_lens, kv_lens, dims=(64, 32))
    found = explain(**args, causal=causal, window_size=window, return_softmax_lse=True)
    pairs, keys = counted(q_lens, kv_lens, causal, window)
    assert found.flops == 2 * pairs * 6 * (64 + 32)
    rows = sum(q_lens) * 6 * (64 * 2 + 32 * 2 + 4)
    assert found.bytes_moved == keys * 2 * (64 + 32) * 2 + rows
    assert found.lengths_known


def test_roof_is_bytes_or_flops_of_an_h200():
    decode = explain(**paged((1,) * 64, (8192,) * 64, heads=(32, 8), dims=(128, 128)))
    assert decode.roof_seconds == pytest.approx(decode.bytes_moved / 4.54e12)
    assert decode.device.name == "NVIDIA H200"
    q = np.zeros((8192, 16, 128), np.float16)
    starts = np.array([0, 8192], np.int32)
    prefill = explain(q, q, q, 8192, starts, 8192, starts, causal=True)
    assert prefill.flops == 2 * (8192 * 8193 // 2) * 16 * 256
    assert prefill.roof_seconds == pytest.approx(prefill.flops / 780e12)


def test_8_bit_queries_have_the_8_bit_roof():
    q = np.zeros((8192, 16, 128), np.uint8)
    starts = np.array([0, 8192], np.int32)
    found = explain(q, q, q, 8192, starts, 8192, starts)
    assert found.roof_seconds == pytest.approx(found.flops / 1398e12)


def test_a_gpu_without_measured_roofs_has_none():
    found = explain(**paged(), device=DeviceInfo("NVIDIA L4", 0, (8, 9), 58, 101376))
    assert found.roof_seconds is None
    assert "roof" not in str(found)
    assert "8.9" in found.unsupported[3]


def test_text_has_everything_that_was_asked_for():
    found = explain(**paged(), causal=True)
    text = str(found)
    for part in ("NumPy on the CPU", "2 requests", "pages of 16", "6 on 2 of size 64", "fp16",
                 "tile", "workspace    0 bytes", "MB", "GFLOP", "µs on NVIDIA H200"):  # fmt: skip
        assert part in text
    assert found.version is None
    assert found.workspace_bytes == 0
    assert found.plans == ()
    for version, why in found.unsupported.items():
        assert f"not {version}" in text
        assert why in text


def test_nothing_is_computed():
    args = paged()
    out = np.full((4, 6, 64), 7, np.float16)
    assert isinstance(explain(**args, out=out), Explanation)
    assert (out == 7).all()


def test_arguments_are_those_of_the_call():
    with pytest.raises(ValueError, match="softcap"):
        explain(**paged(), softcap=-1.0)
    with pytest.raises(TypeError, match="max_seqlen"):
        explain(np.zeros((1, 1, 8)), None, None)
    metadata = cupyflash.get_scheduler_metadata(
        2, 3, 20, 6, 2, 64, paged()["seqused_k"], "float16", page_size=16
    )
    explain(**paged(), scheduler_metadata=metadata)
    with pytest.raises(ValueError, match=r"window_right=-1 \(the call has 0\)"):
        explain(**paged(), scheduler_metadata=metadata, causal=True)


def test_on_a_gpu_the_launches_are_named():
    with gpu((9, 0)):
        found = explain(**paged((1, 1), (4096, 9), page=1024), causal=True)
        size = cupyflash.workspace_size(
            cupyflash.AttentionBounds(
                batch_size=2, max_seqlen_q=1, max_seqlen_k=4096, num_heads_q=6, num_heads_kv=2,
                headdim=64, dtype="float16", page_size=1024, max_blocks=3, causal=True,
            )
        )  # fmt: skip
    assert found.version == 3
    assert not found.unsupported
    assert found.plans
    assert found.workspace_bytes == size
    assert found.tile is None
    for plan in found.plans:
        assert plan.variant.symbol in str(found)
    assert "decode" in found.plans[0].variant.symbol
    with gpu((8, 6)):
        older = explain(**paged((1, 1), (4096, 9), page=1024))
        with pytest.raises(ValueError, match="version 3"):
            explain(**paged(), fa_version=3)
    assert older.version == 2
    assert set(older.unsupported) == {3}


def test_lengths_on_a_gpu_are_not_read():
    args = paged((1, 3), (20, 9))
    host = {n: args.pop(n) for n in ("cu_seqlens_q", "seqused_k")}

    problem = explain(**args, **host).problem
    arrays = AttentionArrays(*(None,) * 3, cu_seqlens_q=object())
    known, q_lens, k_lens = _lengths(problem, arrays)
    assert not known
    assert (list(q_lens), list(k_lens)) == ([2, 2], [20, 20])


@pytest.mark.parametrize(("q_lens", "says", "first"), [
    ((1,) * 4, "Hopper decode", "attention_decode_sm90"),
    ((300,) * 4, "Hopper prefill; not Hopper decode: a request may", "attention_fwd_sm90"),
    ((1, 1, 300), "Hopper prefill; requests of at most 5 queries", "attention_fwd_sm90"),
])  # fmt: skip
def test_which_hopper_kernels_serve_a_call(q_lens, says, first):
    with gpu((9, 0)):
        found = explain(**paged(q_lens, (400,) * len(q_lens), dims=(64, 64)))
        assert found.version == 3
        assert found.kernels.startswith(says)
        assert f"kernels      {found.kernels}" in str(found)
        assert found.plans[0].variant.symbol.startswith(first)
        strange = explain(
            **paged((300,), (400,), dims=(64, 64)), batch_invariant=True, fa_version=2
        )
        assert strange.kernels == "portable"
