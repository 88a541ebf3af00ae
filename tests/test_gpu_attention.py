"""The portable attention kernels on a GPU: random cases, repeats, a captured step."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from repeats import bits, check_repeats
from test_emul_attention import ANY, OPTIONS, attend, on_kernels

import cupyflash
from cupyflash.bounds import AttentionBounds
from cupyflash.testing import Case

pytestmark = pytest.mark.gpu


EXAMPLES = int(os.environ.get("CUPYFLASH_GPU_EXAMPLES", "200"))
"""Random cases in all; `make test-gpu-deep` takes 2,400."""
SHARDS = 16


@pytest.mark.parametrize("shard", range(SHARDS))
@settings(max_examples=max(1, EXAMPLES // SHARDS))
@given(case=ANY, **OPTIONS)
def test_any_case(shard, case, num_splits, batch_invariant):
    """Shards draw their own cases, so that several processes share the work."""
    import cupy

    inputs = on_kernels(case).make(cupy)
    check_repeats(inputs, attend, num_splits=num_splits, batch_invariant=batch_invariant)


REPEATED = {
    "ragged decode": Case(
        lengths=((1, 900), (1, 5000), (1, 17)), num_heads_kv=2, group_size=4, page_size=16,
        q_type="bf16", kv_type="bf16",
    ),
    "8-bit keys": Case(
        lengths=((1, 3000), (1, 40)), num_heads_kv=2, group_size=8, page_size=64, head_dim=128,
        q_type="bf16", kv_type="e4m3",
    ),
    "mixed": Case(
        lengths=((1, 2000), (150, 50), (1, 64)), num_heads_kv=1, group_size=4, page_size=16,
        causal=True, head_dim=128, q_type="bf16", kv_type="bf16",
    ),
    "prefill": Case(lengths=((300, 0), (129, 7)), causal=True, q_type="fp16", kv_type="fp16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_ten_thousand_repeats_have_the_same_bits(name):
    import cupy

    inputs, rows = REPEATED[name].make(cupy), sum(REPEATED[name].q_lens)
    inputs.call(attend)
    out, lse = (inputs.placed[key].view for key in ("out", "lse"))
    arguments = {**inputs.args, "out": out, "lse": lse}
    found = (out.view(cupy.uint16)[:rows], lse.view(cupy.uint32)[:, :rows])
    right = [array.copy() for array in found]
    changed = cupy.zeros((), cupy.int64)
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attend(**arguments)
        stream.synchronize()
        stream.begin_capture()
        attend(**arguments)
        graph = stream.end_capture()
        for _ in range(10_000):
            graph.launch(stream)
            for array, expected in zip(found, right, strict=True):
                changed += (array != expected).any()
        stream.synchronize()
    assert int(changed) == 0


def test_a_captured_decode_step_follows_lengths_slots_and_a_dirty_workspace():
    """Two of four requests are padding: no keys, slot -1. Replayed at lengths up to 8192."""
    import cupy
    import ml_dtypes

    page, pages, heads, dim = 16, 2048, 2, 128
    rng = np.random.default_rng(3)
    draw = lambda *shape: cupy.asarray(  # noqa: E731
        rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    )
    q, key, value = draw(4, 8, dim), draw(4, heads, dim), draw(4, heads, dim)
    caches = [draw(pages, page, heads, dim) for _ in range(2)]
    table = cupy.asarray(rng.permutation(pages).reshape(4, 512).astype(np.int32))
    starts = cupy.arange(5, dtype=cupy.int32)
    used, slots = cupy.zeros(4, cupy.int32), cupy.full(4, -1, cupy.int64)
    bounds = AttentionBounds(
        batch_size=4, max_seqlen_q=1, max_seqlen_k=8192, num_heads_q=8, num_heads_kv=heads,
        headdim=dim, page_size=page,
    )  # fmt: skip
    workspace = cupy.full(cupyflash.workspace_size(bounds, fa_version=2), 0xFF, cupy.uint8)
    out, lse = cupy.empty_like(q), cupy.empty((8, 4), cupy.float32)

    def step():
        cupyflash.reshape_and_cache_flash(key, value, *caches, slots, "auto", 1.0, 1.0)
        attend(
            q, *caches, 1, starts, 8192, seqused_k=used, block_table=table, causal=True, out=out,
            lse=lse, return_softmax_lse=True, workspace=workspace,
        )  # fmt: skip

    def set_lengths(lengths):
        used[...] = cupy.asarray(lengths, cupy.int32)
        host = table.get()
        slots[...] = cupy.asarray(
            [host[i, (n - 1) // page] * page + (n - 1) % page if n else -1
             for i, n in enumerate(lengths)]
        )  # fmt: skip
        workspace.fill(0xFF)
        out.view(cupy.uint16).fill(0xFFFF)
        lse.view(cupy.uint32).fill(0xFFFFFFFF)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        set_lengths([64, 64, 0, 0])
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for lengths in ([64, 64, 0, 0], [8192, 1, 0, 0], [5000, 8191, 0, 0], [100, 8192, 7, 0]):
            set_lengths(lengths)
            graph.launch(stream)
            stream.synchronize()
            replayed = bits((out.get(), lse.get()))
            set_lengths(lengths)
            step()
            stream.synchronize()
            assert bits((out.get(), lse.get())) == replayed
            empty = np.asarray(lengths) == 0
            assert (np.isneginf(lse.get()) == empty).all()
            assert not out.get().astype(np.float32)[empty].any()
