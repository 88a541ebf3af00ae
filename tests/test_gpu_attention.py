"""The portable attention kernels on a GPU: random cases, repeats, graphs, pools past 4 GB."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from test_emul_attention import ANY, OPTIONS, bits, on_kernels

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.testing import Case

pytestmark = pytest.mark.gpu


@settings(max_examples=200)
@given(case=ANY, **OPTIONS)
def test_any_case(case, num_splits, batch_invariant):
    import cupy

    inputs = on_kernels(case).make(cupy)
    options = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    first = inputs.call(flash_attn_varlen_func, **options)
    inputs.expected().check(*first)
    assert bits(inputs.call(flash_attn_varlen_func, **options)) == bits(first)


def test_a_graph_captured_at_short_lengths_is_replayed_at_long_ones():
    import cupy

    case = Case(
        lengths=((1, 8191), (1, 63), (1, -1), (1, 4000)), num_heads_kv=2, group_size=4,
        page_size=16, head_dim=128, q_type="bf16", kv_type="bf16", causal=True,
    )  # fmt: skip
    inputs = case.make(cupy)
    right = inputs.call(flash_attn_varlen_func)
    used = inputs.args["seqused_k"].copy()
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    arguments = {**inputs.args, "out": out, "lse": lse}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        flash_attn_varlen_func(**arguments)
        inputs.args["seqused_k"][...] = cupy.minimum(used, 64)
        stream.begin_capture()
        flash_attn_varlen_func(**arguments)
        graph = stream.end_capture()
        inputs.args["seqused_k"][...] = used
        inputs.placed["out"].buffer.view(cupy.uint8)[...] = 0xFF
        graph.launch(stream)
        stream.synchronize()
    rows = sum(case.q_lens)
    assert out.get()[:rows].tobytes() == right[0][:rows].tobytes()
    assert lse.get()[:, :rows].tobytes() == right[1][:, :rows].tobytes()


def test_pages_past_4_gb():
    import cupy

    page, heads, dim = 256, 8, 128
    blocks = (5 << 30) // (page * heads * dim * 2)
    rng = np.random.default_rng(0)
    small = rng.standard_normal((2, page, heads, dim)).astype(np.float16)
    pool = cupy.zeros((blocks, page, heads, dim), cupy.float16)
    pool[-2:] = cupy.asarray(small)
    q = cupy.asarray(rng.standard_normal((1, heads, dim)).astype(np.float16))
    starts, used = cupy.asarray([0, 1], dtype=np.int32), cupy.asarray([2 * page], dtype=np.int32)
    found = []
    for cache, first in ((pool, blocks - 2), (cupy.asarray(small), 0)):
        table = cupy.asarray([[first, first + 1]], dtype=np.int32)
        found.append(
            flash_attn_varlen_func(
                q, cache, cache, 1, starts, 2 * page, seqused_k=used, block_table=table
            ).get()
        )
    assert bits(found[:1]) == bits(found[1:])
