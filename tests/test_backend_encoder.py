"""Encoders and cross attention: from a step through builder and layer to the oracle's answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from step_cases import Case, cases, lengths
from steps import Made

from cupyflash.backend import AttentionType
from cupyflash.backends import CrossAttentionBuilder, EncoderOnlyAttentionBuilder
from cupyflash.backends.cross_attention import encoder_slot_mapping
from cupyflash.testing import expect_attention


@given(
    case=cases(layout="NHD", causal=False),
    kind=st.sampled_from([AttentionType.ENCODER_ONLY, AttentionType.ENCODER]),
)
def test_encoder_tokens_see_each_other_without_a_cache(step_path, case, kind):
    case = case.replace(
        lengths=tuple((q, 0) for q, _ in case.lengths), kv_cache_dtype="auto", q_fp8=False
    )
    assume(sum(case.q_lens))
    made = Made(step_path, case)
    impl = made.make_impl(attn_type=kind)
    metadata = made.builder.build(0, made.common)
    key, value = made.tokens(made.keys, True), made.tokens(made.values, True)
    impl.forward(made.layer, made.query, key, value, None, metadata, made.output)
    args = made.arguments()
    for name in ("block_table", "seqused_k"):
        del args[name]
    rows = sum(case.q_lens)
    reach = -1 if case.window is None else case.window - 1
    args.update(
        k=step_path.host(key)[:rows],
        v=step_path.host(value)[:rows],
        cu_seqlens_k=args["cu_seqlens_q"],
        window_size=(reach, 0 if kind is AttentionType.ENCODER and reach >= 0 else reach),
    )
    expect_attention(**args, out_dtype=made.case.dtype).check(made.live())


def test_encoder_only_steps_are_never_causal(step_path):
    made = Made(step_path, Case(((5, 0),)), EncoderOnlyAttentionBuilder)
    assert made.common.causal
    assert not made.builder.build(0, made.common).causal


@given(
    case=cases(window=None, alibi=False, layout="NHD", lengths=lengths(max_context=3)),
    encoder=st.lists(st.integers(0, 40), min_size=4, max_size=4),
)
def test_cross_attention_writes_new_requests_and_reads_all(step_path, case, encoder):
    """Decoder queries over encoder tokens; those of requests that decode already are there."""
    decoder = case.lengths
    encoder = encoder[: len(decoder)]
    # The cache holds encoder tokens: as many "earlier" tokens, and no new ones.
    made = Made(step_path, case.replace(lengths=tuple((0, n) for n in encoder), pad_tokens=0))
    impl = made.make_impl(attn_type=AttentionType.ENCODER_DECODER)
    queries = Made(step_path, made.case.replace(lengths=decoder, pad_tokens=0))
    lens = np.array([*encoder, *[0] * case.pad_reqs], np.int32)
    common = replace(
        queries.common,
        block_table_tensor=made.common.block_table_tensor,
        encoder_seq_lens=step_path.array(lens),
        encoder_seq_lens_cpu=lens,
    )
    builder = CrossAttentionBuilder(made.builder.kv_cache_spec, ["layer"], made.config)
    metadata = builder.build(0, common)
    new = [context == 0 and q > 0 for q, context in decoder]
    for is_new in (False, True):  # earlier steps wrote the others
        keys, values = (
            np.concatenate([x for x, n in zip(o, new, strict=True) if n is is_new] or [o[0][:0]])
            for o in (made.keys, made.values)
        )
        slots = metadata.slot_mapping if is_new else step_path.array(old_slots(made, new))
        impl.do_kv_cache_update(
            made.layer, step_path.array(keys), step_path.array(values), made.cache, slots
        )
    impl.forward(made.layer, queries.query, None, None, made.cache, metadata, queries.output)
    args = {**made.arguments(), "causal": False}
    args.update({n: queries.arguments()[n] for n in ("q", "cu_seqlens_q")})
    precision = made.precision(args, max(queries.case.q_lens), max(made.case.kv_lens))
    expect_attention(**args, out_dtype=made.case.dtype, **precision).check(queries.live())


def test_encoder_tokens_of_new_requests_have_slots(step_path):
    """A request that decodes already has none, nor has one that this step does not run."""
    made = Made(step_path, Case(((1, 7), (2, 0), (0, 0), (1, 0)), pad_reqs=1))
    lens = np.array([9, 17, 5, 2, 0], np.int32)
    table = np.array([[1, 9], [2, 3], [4, 9], [5, 9], [0, 0]], np.int32)
    common = replace(
        made.common,
        block_table_tensor=step_path.array(table),
        encoder_seq_lens=step_path.array(lens),
        encoder_seq_lens_cpu=lens,
    )
    slots = step_path.host(encoder_slot_mapping(common, 16))
    assert slots.tolist() == [*range(32, 48), 48, 80, 81]
    assert slots.dtype == np.int64


@pytest.mark.parametrize("missing", ["encoder_seq_lens", "capture", "update"])
def test_what_cross_attention_cannot_do(step_path, missing):
    made = Made(step_path, Case(((1, 0),)), CrossAttentionBuilder)
    if missing == "encoder_seq_lens":
        with pytest.raises(ValueError, match="encoder_seq_lens is None"):
            made.builder.build(0, made.common)
    elif missing == "capture":
        with pytest.raises(NotImplementedError, match="cannot be captured"):
            made.builder.build_for_cudagraph_capture(made.common)
    else:
        assert not made.builder.supports_update_block_table
        with pytest.raises(NotImplementedError, match="call build"):
            made.builder.update_block_table(None, None, None)


def old_slots(made, new):
    size = made.case.block_size
    return np.concatenate(
        [
            row[np.arange(n) // size].astype(np.int64) * size + np.arange(n) % size
            for row, (_, n), is_new in zip(made.table, made.case.lengths, new, strict=False)
            if not is_new
        ]
        or [np.zeros(0, np.int64)]
    )
