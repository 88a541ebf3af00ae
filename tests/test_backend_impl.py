"""From an engine's step through builder and layer to the oracle's answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import Path
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from step_cases import Case, cases
from steps import Made

from cupyflash import fa_version, quantize_fp8
from cupyflash.testing import DTYPES, expect_attention, merge_baseline


@given(case=cases())
def test_a_step_has_the_oracles_answer(step_path, case):
    made = Made(step_path, case)
    out = made.run(made.builder.build(0, made.common))
    made.expected().check(out)


@settings(max_examples=15)
@given(case=cases(), blocks=st.integers(0, 2))
def test_a_step_of_the_real_kernels(path, case, blocks):
    """On every path, the emulator too; with a shared prefix where there can be one."""
    if blocks:
        case = case.replace(causal=True, window=None, alibi=False)
    prefix = blocks * case.block_size
    lengths = tuple((max(q, 1), n + prefix) for q, n in case.lengths)
    made = Made(path, case.replace(lengths=lengths, prefix=prefix))
    out = made.run(made.builder.build(prefix, made.common))
    check_cascade(made, out, prefix) if prefix else made.expected().check(out)


@pytest.mark.gpu
@given(case=cases())
def test_a_step_of_the_portable_kernels(case):
    """Where the default is those of compute capability 9.0."""
    path = Path("gpu")
    with fa_version(2):
        made = Made(path, case)
        out = made.run(made.builder.build(0, made.common))
    made.expected().check(out)


@given(case=cases(head_size=32), fast=st.booleans())
def test_lse_and_schedule_do_not_change_the_answer(step_path, case, fast):
    made = Made(step_path, case)
    made.impl.need_to_return_lse_for_decode = True
    metadata = made.builder.build(0, made.common, fast_build=fast)
    assert (metadata.scheduler_metadata is None) == fast
    made.write(new=False)
    key, value = made.write(True, metadata.slot_mapping)
    out, lse = made.impl.forward(
        made.layer, made.query, key, value, made.cache, metadata, made.output
    )
    assert out is made.output
    made.expected().check(made.live(), step_path.host(lse)[:, : sum(made.case.q_lens)])


@given(case=cases(causal=True, window=None, alibi=False, layout="NHD"), blocks=st.integers(1, 3))
def test_a_shared_prefix_read_once_has_the_same_answer(step_path, case, blocks):
    assume(sum(case.q_lens))
    prefix = blocks * case.block_size
    case = case.replace(
        prefix=prefix, lengths=tuple((q, context + prefix) for q, context in case.lengths)
    )
    made = Made(step_path, case)
    metadata = made.builder.build(prefix, made.common)
    assert metadata.use_cascade
    check_cascade(made, made.run(metadata), prefix)


def check_cascade(made, out, prefix):
    """The bound is that of two passes: both round their output, and so does the merge."""
    args, case = made.arguments(), made.case
    blocks, tokens = prefix // case.block_size, sum(case.q_lens)
    first = {
        "cu_seqlens_q": np.array([0, tokens], np.int32),
        "seqused_k": np.array([prefix], np.int32),
        "block_table": args["block_table"][:1, :blocks],
        "causal": False,
    }
    first.update({n: args[n][:1] for n in ("q_descale", "k_descale", "v_descale") if n in args})
    own = {
        "seqused_k": args["seqused_k"] - np.int32(prefix),
        "block_table": args["block_table"][:, blocks:],
        "s_aux": None,
    }
    kind = DTYPES[case.dtype]
    sizes = ((tokens, prefix), (max(case.q_lens), max(case.kv_lens) - prefix))
    parts = [
        expect_attention(**part, out_dtype=kind, **made.precision(part, *size))
        for part, size in zip(({**args, **first}, {**args, **own}), sizes, strict=True)
    ]
    low = [(part.out_baseline, part.lse_baseline) for part in parts]
    whole = made.expected()
    replace(whole, out_baseline=merge_baseline(*low, out_dtype=kind)[0]).check(out)


def test_a_profiling_run_gives_zeros(step_path):
    made = Made(step_path, Case(((2, 0),)))
    made.impl.forward(made.layer, made.query, None, None, made.cache, None, made.output)
    assert not step_path.host(made.output).any()


# B32: padded requests point at block 0, whose content is NaN.
def test_padded_requests_leave_real_rows_as_they_are(step_path):
    case = Case(((1, 20), (4, 3), (1, 0)), num_kv_heads=2, group_size=2)
    alone = Made(step_path, case)
    right = alone.run(alone.builder.build(0, alone.common))
    padded = Made(step_path, case.replace(pad_reqs=2, pad_tokens=3))
    assert np.isnan(step_path.host(padded.cache)[:, 0].astype(np.float32)).all()
    padded.query[: len(right)] = alone.query
    assert padded.run(padded.builder.build(0, padded.common)).tobytes() == right.tobytes()


# B61: sinks with an 8-bit cache. q = 0, four keys, sink 0, v = j, v scale 2: out 2 * 6 / 5.
def test_sinks_hold_with_a_quantised_cache(step_path):
    case = Case(((1, 3),), dtype="bf16", kv_cache_dtype="fp8", sink=True)
    made = Made(step_path, case)
    made.layer._k_scale, made.layer._v_scale, made.sinks[:] = 1.0, 2.0, 0
    impl = made.make_impl()
    made.query[...] = 0
    made.values[0][...] = (2 * np.arange(4))[:, None, None]
    out = made.run(made.builder.build(0, made.common), impl)
    np.testing.assert_array_equal(out, np.full_like(out, 2.4))


# B23: a shared prefix under a window of 16 tokens: row i sees the 16 keys up to its own.
def test_a_window_declines_the_shared_prefix(step_path):
    case = Case(((8, 48),), prefix=48, window=16, block_size=16)
    made = Made(step_path, case)
    assert not made.builder.use_cascade_attention(4096, [1] * 64, 8, 2, False, True, False, 132, 1)
    with pytest.raises(ValueError, match=r"window \(15, 0\)"):
        made.builder.build(48, made.common)
    made.query[...] = 0
    made.values[0][...] = np.arange(56)[:, None, None]
    out = made.run(made.builder.build(0, made.common))
    np.testing.assert_allclose(out[:, 0, 0], 40.5 + np.arange(8), rtol=1e-6)


# B65: descales other than 1, different for each head.
def test_scales_of_each_head_reach_the_call(step_path):
    case = Case(((1, 30),), num_kv_heads=2, dtype="bf16", kv_cache_dtype="fp8", scales="head")
    made = Made(step_path, case)
    made.layer._k_scale[...] = step_path.array([0.5, 2.0], np.float32)
    made.layer._v_scale[...] = step_path.array([1.0, 3.0], np.float32)
    out = made.run(made.builder.build(0, made.common))
    made.expected().check(out)
    swapped = made.expected(k_descale=np.array([[2.0, 0.5]], np.float32))
    with pytest.raises(AssertionError):
        swapped.check(out)


@settings(max_examples=10)
@given(case=cases(window=None, layout="NHD"))
def test_batch_invariant_steps_have_the_oracles_answer(step_path, case):
    made = Made(step_path, case, batch_invariant=True)
    metadata = made.builder.build(0, made.common)
    assert metadata.max_num_splits == 1
    assert metadata.batch_invariant
    assert metadata.scheduler_metadata is None
    out = made.run(metadata)
    made.expected().check(out)


@pytest.mark.parametrize("granularity", ["tensor", "group"])
def test_queries_quantised_by_the_engine(step_path, granularity):
    """As an engine does it before `forward`: a static scale for all, or for each KV head."""
    scales = "head" if granularity == "group" else "number"
    case = Case(((1, 30), (5, 9)), num_kv_heads=2, group_size=2, dtype="bf16",
                kv_cache_dtype="fp8", q_fp8=True, scales=scales)  # fmt: skip
    made = Made(step_path, case)
    assert made.make_impl().supports_quant_query_input
    shape = made.query.shape
    values = step_path.array(made.rng.standard_normal(shape).astype(np.float32))
    groups = 2 if granularity == "group" else None
    bits, _ = quantize_fp8(values, granularity, num_heads_kv=groups, scale=made.layer._q_scale)
    made.query[...] = bits.view(np.uint8)
    out = made.run(made.builder.build(0, made.common))
    made.expected().check(out)
