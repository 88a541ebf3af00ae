"""Attention kernels of every family on a GPU: graphs replayed at other lengths, pools past 4 GB."""

from __future__ import annotations

import numpy as np
import pytest
from repeats import bits
from test_mla import CASE as LATENT

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.fa_version import is_fa_version_supported
from cupyflash.mla import mla_decode
from cupyflash.testing import Case

pytestmark = pytest.mark.gpu

DECODE = Case(
    lengths=((1, 8191), (1, 63), (1, -1), (1, 4000)), num_heads_kv=2, group_size=4, page_size=16,
    head_dim=128, q_type="bf16", kv_type="bf16", causal=True,
)  # fmt: skip
PROMPTS = DECODE.replace(lengths=((200, 800), (130, 70), (64, -3)))
MIXED = DECODE.replace(lengths=((1, 8191), (130, 70), (1, 300), (64, -3)))
LATENT_STEP = LATENT.replace(lengths=((1, 8191), (2, 63), (1, 0), (1, 4000)), page_size=64)
# Version and case. Keys of an 8-bit cache under 16-bit queries have kernels of their own.
REPLAYED = {
    "portable decode": (2, DECODE),
    "portable prompts": (2, PROMPTS),
    "portable 8-bit keys": (2, DECODE.replace(kv_type="e4m3", descale=True)),
    "Hopper decode": (3, DECODE),
    "Hopper decode, 8-bit keys": (3, DECODE.replace(kv_type="e4m3", descale=True)),
    "Hopper prompts": (3, PROMPTS),
    "Hopper prompts, 8 bit": (3, PROMPTS.replace(q_type="e4m3", kv_type="e4m3")),
    "Hopper mixed": (3, MIXED),
    "latent, 16 heads": (None, LATENT_STEP.replace(group_size=16)),
    "latent, 128 heads": (None, LATENT_STEP.replace(group_size=128)),
}


def need(version):
    if version == 3 and not is_fa_version_supported(3):
        pytest.skip("version 3 needs compute capability 9.0")


@pytest.mark.parametrize("workspace", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_a_graph_captured_at_short_lengths_is_replayed_at_long_ones(name, workspace):
    """Fifty times, with the eager bits each time; a workspace of the caller's may hold anything."""
    import cupy

    version, case = REPLAYED[name]
    need(version)
    inputs = case.make(cupy)
    more = {"fa_version": version}
    if workspace:
        more["workspace"] = cupy.full(64 << 20, 0xFF, cupy.uint8)
    right = inputs.call(flash_attn_varlen_func, **more)
    used = inputs.args["seqused_k"].copy()
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    rows = sum(case.q_lens)
    found = (out[:rows].view(cupy.uint16), lse[:, :rows].view(cupy.uint32))
    wanted = [array.copy() for array in found]
    changed = cupy.zeros((), cupy.int64)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        inputs.args["seqused_k"][...] = cupy.minimum(used, 64)
        flash_attn_varlen_func(**inputs.args, out=out, lse=lse, **more)
        stream.synchronize()
        stream.begin_capture()
        flash_attn_varlen_func(**inputs.args, out=out, lse=lse, **more)
        graph = stream.end_capture()
        inputs.args["seqused_k"][...] = used
        for _ in range(50):
            for array in found:
                array.fill(0xFFFF)
            if workspace:
                more["workspace"].fill(0xFF)
            graph.launch(stream)
            for array, expected in zip(found, wanted, strict=True):
                changed += (array != expected).any()
        stream.synchronize()
    assert int(changed) == 0
    replayed = (out.get()[:rows], lse.get()[:, :rows])
    assert bits(replayed) == bits((right[0][:rows], right[1][:, :rows]))


# Version, page size, queries, type.
FAR = {
    "portable decode": (2, 256, 1, "fp16"),
    "portable prompts": (2, 64, 200, "fp16"),
    "Hopper decode": (3, 16, 1, "bf16"),
    "Hopper prompts": (3, 64, 200, "bf16"),
    "Hopper prompts, 8 bit": (3, 64, 200, "e4m3"),
}


@pytest.mark.parametrize("name", FAR)
def test_pages_past_4_gb(name):
    """Keys at the end of a pool of 5 GB give the bits of the same keys in a small one."""
    import cupy

    version, page, q_len, kind = FAR[name]
    need(version)
    case = DECODE.replace(
        lengths=((q_len, 512 - q_len),), page_size=page, q_type=kind, kv_type=kind, layout="NHD"
    )
    args = dict(case.make(cupy).args)
    args["v"] = args["k"]  # one pool for both
    near = flash_attn_varlen_func(**args, fa_version=version).get()
    pages = args["k"].shape[0]
    blocks = (5 << 30) // args["k"][0].nbytes
    pool = cupy.zeros((blocks, *args["k"].shape[1:]), args["k"].dtype)
    pool[-pages:] = args["k"]
    args["k"] = args["v"] = pool
    args["block_table"][:, : -(-512 // page)] += blocks - pages
    far = flash_attn_varlen_func(**args, fa_version=version).get()
    assert bits((near[:q_len],)) == bits((far[:q_len],))


@pytest.mark.parametrize("heads", [16, 64])
def test_latent_pages_past_4_gb(heads):
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
