"""The Hopper decode kernel on a GPU: random cases, repeats, many requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import check_repeats
from test_emul_decode_sm90 import PLAIN, decode_cases
from test_emul_invariant_sm90 import CASES

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.testing import Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


@settings(max_examples=200)
@given(
    case=decode_cases(), num_splits=st.sampled_from([0, 0, 1, 2, 5]),
    invariant=st.sampled_from([False, False, True]),
)  # fmt: skip
@pytest.mark.parametrize("share", range(6))
def test_any_case(case, num_splits, invariant, share):
    import cupy

    inputs = case.make(cupy)
    options = {"num_splits": num_splits, "fa_version": 3, "batch_invariant": invariant}
    check_repeats(inputs, flash_attn_varlen_func, inputs.precision(**options), **options)


LONG = {
    "one": Case(lengths=((1, 20_000),), num_heads_kv=1, group_size=8),
    "ragged": Case(lengths=tuple((1, n) for n in (9000, 0, 16, 700, 3, 5000, -1, 2047, 64)),
                   num_heads_kv=4, group_size=4),
    "many tokens": Case(lengths=((4, 3000), (2, 5), (4, -1), (1, 4095)), num_heads_kv=2,
                        group_size=4, causal=True),
    "window": Case(lengths=((1, 9000), (2, 100)), num_heads_kv=2, group_size=2,
                   window_size=(4000, 0), sink=True, softcap=20.0, alibi="head"),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("types", [("bf16", "bf16"), ("bf16", "e4m3"), ("e4m3", "e4m3")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(name, types, head_dim):
    import cupy

    case = LONG[name].replace(head_dim=head_dim, page_size=16, q_type=types[0], kv_type=types[1])
    inputs = case.make(cupy)
    precision = inputs.precision(fa_version=3)
    check_repeats(inputs, flash_attn_varlen_func, precision, times=20, fa_version=3)


def test_ten_thousand_repeats():
    import cupy

    inputs = PLAIN.replace(lengths=((1, 5000), (1, 700), (1, 16)), num_heads_kv=4).make(cupy)
    out = cupy.empty((10_000, *inputs.placed["out"].view.shape), inputs.args["q"].dtype)
    for i in range(len(out)):
        flash_attn_varlen_func(**inputs.args, out=out[i], fa_version=3)
    rows = out.view(cupy.uint16)[:, : sum(inputs.case.q_lens)]
    assert bool((rows == rows[:1]).all())


_ALIKE = Case(lengths=((1, 8000),), num_heads_kv=8, group_size=4, head_dim=128, page_size=16,
              q_type="bf16", kv_type="bf16")  # fmt: skip
ALIKE = {
    "one": _ALIKE,
    "one head": _ALIKE.replace(lengths=((1, 20_000),), num_heads_kv=1, group_size=8),
    "eight": _ALIKE.replace(lengths=((1, 2000),) * 8),
    "many rows": _ALIKE.replace(lengths=((4, 3000),) * 2, num_heads_kv=4, causal=True),
    "wide": _ALIKE.replace(lengths=((1, 3000),) * 3, num_heads_kv=4, group_size=2, head_dim=256),
    "8 bits": _ALIKE.replace(kv_type="e4m3"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_segments_on_several_streams_at_once(name):
    import cupy

    case = ALIKE[name].replace(page_size=16, q_type="bf16")
    inputs = case.make(cupy)
    first = inputs.call(flash_attn_varlen_func, fa_version=3)
    inputs.expected(**inputs.precision(fa_version=3)).check(*first)  # of 256: the prefill's
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(6)]
    outs = cupy.empty((6, 50, *inputs.placed["out"].view.shape), inputs.args["q"].dtype)
    cupy.cuda.get_current_stream().synchronize()
    for turn in range(50):
        for stream, out in zip(streams, outs, strict=True):
            with stream:
                flash_attn_varlen_func(**inputs.args, out=out[turn], fa_version=3)
    for stream in streams:
        stream.synchronize()
    rows = outs.view(cupy.uint16)[:, :, : sum(case.q_lens)]
    assert bool((rows == rows[:1, :1]).all())


@pytest.mark.parametrize("name", CASES)
def test_a_request_alone_has_the_bits_it_has_in_company(name):
    import cupy

    case = CASES[name].replace(lengths=(*CASES[name].lengths, (1, 30_000), (1, 8192)))
    inputs, options = case.make(cupy), {"fa_version": 3, "batch_invariant": True}
    out, lse = inputs.call(flash_attn_varlen_func, **options)
    inputs.expected().check(out, lse)
    args, starts = inputs.args, inputs.args["cu_seqlens_q"].get()
    for request in range(len(case.lengths)):
        rows, taken = slice(starts[request], starts[request + 1]), slice(request, request + 1)
        alone = {
            "q": args["q"][rows],
            "cu_seqlens_q": cupy.asarray([0, rows.stop - rows.start], cupy.int32),
            "seqused_k": args["seqused_k"][taken],
            "block_table": args["block_table"][taken],
        }
        more = {**args, **alone, "return_softmax_lse": True}
        found = flash_attn_varlen_func(**more, **options)
        assert found[0].get().tobytes() == out[rows].tobytes()
        assert found[1].get().tobytes() == lse[:, rows].tobytes()


@pytest.mark.parametrize("batch", [500, 1024, 3000])
def test_large_batches(batch):
    import cupy

    contexts = np.random.default_rng(batch).integers(-1, 40, batch).tolist()
    case = PLAIN.replace(lengths=tuple((1, c) for c in contexts), num_heads_kv=1, group_size=2,
                         head_dim=64)  # fmt: skip
    case.make(cupy).check(flash_attn_varlen_func, fa_version=3)


@pytest.mark.parametrize(
    "shape",
    [
        ("bf16", 128, 1),
        ("fp16", 128, 1),
        ("bf16", 128, 4),
        ("fp16", 128, 8),
        ("e4m3", 128, 4),
        ("e5m2", 128, 8),
        ("bf16", 64, 4),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_heads_side_by_side(shape, alike):
    """So many requests that the warps of a block share what comes for all of their heads."""
    import cupy

    kv_type, head_dim, group = shape
    lengths = [600] * 140 if alike else [(37 * i * i) % 1500 - 1 for i in range(140)]
    case = Case(lengths=tuple((1, n) for n in lengths), num_heads_kv=8, group_size=group,
                head_dim=head_dim, page_size=16, kv_type=kv_type,
                q_type="bf16" if kv_type.startswith("e") else kv_type)  # fmt: skip
    inputs = case.make(cupy)
    precision = inputs.precision(fa_version=3)
    check_repeats(inputs, flash_attn_varlen_func, precision, times=20, fa_version=3)
