"""Multi-head latent attention on a GPU: random cases, repeats, graphs, pools past 4 GB."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_emul_mla import OPTIONS
from test_mla import CASE, LATENT, decode

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.mla import mla_decode

pytestmark = pytest.mark.gpu


def bits(results):
    return [array.tobytes() for array in results]


@settings(max_examples=500)
@given(case=LATENT, kind=st.sampled_from(["bf16", "fp16"]), **OPTIONS)
def test_any_case(case, kind, num_splits, batch_invariant):
    import cupy

    inputs = case.replace(q_type=kind, kv_type=kind).make(cupy)
    options = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    first = inputs.call(flash_attn_varlen_func, **options)
    inputs.expected().check(*first)
    assert bits(inputs.call(flash_attn_varlen_func, **options)) == bits(first)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_long_sequences(heads, q_len):
    import cupy

    lengths = tuple((q_len, n) for n in (4096, 1, 2047, 8191, 63, 64))
    CASE.replace(lengths=lengths, group_size=heads, page_size=64).make(cupy).check(
        flash_attn_varlen_func
    )


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_captured_at_short_lengths_is_replayed_at_long_ones(heads):
    import cupy

    case = CASE.replace(
        lengths=((1, 8191), (2, 63), (1, 0), (1, 4000)), group_size=heads, page_size=64
    )
    inputs, args = decode(case, cupy)
    right = inputs.call(flash_attn_varlen_func)
    used = args["seqused_k"].copy()
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        mla_decode(**args, out=out, lse=lse)
        args["seqused_k"][...] = cupy.minimum(used, 64)
        stream.begin_capture()
        mla_decode(**args, out=out, lse=lse)
        graph = stream.end_capture()
        args["seqused_k"][...] = used
        inputs.placed["out"].buffer.view(cupy.uint8)[...] = 0xFF
        graph.launch(stream)
        stream.synchronize()
    rows = sum(case.q_lens)
    assert out.get()[:rows].tobytes() == right[0][:rows].tobytes()
    assert lse.get()[:, :rows].tobytes() == right[1][:, :rows].tobytes()


@pytest.mark.parametrize("heads", [16, 64])
def test_pages_past_4_gb(heads):
    import cupy

    page = 64
    blocks = (5 << 30) // (page * 576 * 2)
    rng = np.random.default_rng(0)
    small = rng.standard_normal((2, page, 1, 576)).astype(np.float16)
    pool = cupy.zeros((blocks, page, 1, 576), cupy.float16)
    pool[-2:] = cupy.asarray(small)
    q = cupy.asarray(rng.standard_normal((1, heads, 576)).astype(np.float16))
    starts, used = cupy.asarray([0, 1], dtype=np.int32), cupy.asarray([2 * page], dtype=np.int32)
    found = []
    for cache, first in ((pool, blocks - 2), (cupy.asarray(small), 0)):
        table = cupy.asarray([[first, first + 1]], dtype=np.int32)
        found.append(
            mla_decode(
                q[..., :512], q[..., 512:], cache, table, used, cu_seqlens_q=starts,
                max_seqlen_q=1, max_seqlen_k=2 * page, softmax_scale=0.07,
            ).get()
        )  # fmt: skip
    assert bits(found[:1]) == bits(found[1:])
