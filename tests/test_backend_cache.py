"""What a layer writes to its cache, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from step_cases import LAYOUTS, Case
from steps import Made

from cupyflash.backend import AttentionType
from cupyflash.testing import write_oracle


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_write_lands_in_its_slots_in_every_layout(write_path, layout, kv_cache_dtype):
    case = Case(
        ((3, 18), (1, 40)),
        num_kv_heads=8,  # as many heads as half a block: a mix-up would not fail by its shape
        head_size=32,
        dtype="fp16",
        kv_cache_dtype=kv_cache_dtype,
        scales="head",
        layout=layout,
        pad_tokens=2,
    )
    made = Made(write_path, case)
    before = [write_path.host(c).copy() for c in halves(made)]
    made.write(True, made.common.slot_mapping)
    for half, found, name, operand in zip(
        before, halves(made), "kv", (made.keys, made.values), strict=True
    ):
        scale = write_path.host(getattr(made.layer, f"_{name}_scale"))
        rows, slots = write_path.host(made.tokens(operand, True)), made.slots(True)
        right = write_oracle(rows, half, slots, scale if kv_cache_dtype == "fp8" else 1.0)
        assert write_path.host(found).tobytes() == right.tobytes()


def halves(made):
    shape = (made.case.num_kv_heads, made.case.head_size)
    if made.case.layout.startswith("packed"):
        rows = made.cache.transpose(0, 2, 1, 3)
        return rows[..., : shape[1]], rows[..., shape[1] :]
    return made.cache[0], made.cache[1]


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_encoders_and_sharing_layers_write_nothing(step_path, attn_type):
    made = Made(step_path, Case(((3, 0),)))
    before = step_path.host(made.cache).copy()
    for options in ({"attn_type": attn_type}, {"kv_sharing_target_layer_name": "layers.0"}):
        made.impl = made.make_impl(**options)
        made.write(True, made.common.slot_mapping)
        assert step_path.host(made.cache).tobytes() == before.tobytes()


def test_a_sharing_layer_reads_its_targets_cache(step_path):
    made = Made(step_path, Case(((3, 20),), sink=True))
    sharing = made.make_impl(kv_sharing_target_layer_name="layers.0")
    out = made.run(made.builder.build(0, made.common), sharing)
    made.expected().check(out)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple"),
        ({"alibi_slopes": [0.1]}, "alibi_slopes has 1"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks has 3"),
        ({"sliding_window": 0}, "1 or more"),
        ({"kv_cache_dtype": "int8"}, "not an fp8"),
        ({"attn_type": "decoder-only"}, "decoder-only"),
    ],
)
def test_layers_that_cannot_be_are_refused(step_path, options, match):
    made = Made(step_path, Case(((1, 0),), num_kv_heads=2))
    with pytest.raises(ValueError, match=match):
        made.make_impl(**options)


def test_an_encoder_has_no_quantised_cache(step_path):
    made = Made(step_path, Case(((1, 0),)))
    with pytest.raises(NotImplementedError, match="no cache"):
        made.make_impl(attn_type="encoder_only", kv_cache_dtype="fp8")


@pytest.mark.parametrize("wrong", [None, "x", 3, [1, 2], np.array(3, np.int32)])
def test_a_step_of_what_is_no_array_is_refused(step_path, wrong):
    made = Made(step_path, Case(((1, 20),)))
    step = made.builder.build(0, made.common)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        with pytest.raises((TypeError, ValueError), match=name):
            replace(made.common, **{name: wrong})
    arrays = {"query": made.query, "kv_cache": made.cache, "output": made.output}
    for name in arrays:
        q, cache, out = {**arrays, name: wrong}.values()
        with pytest.raises(ValueError, match=name):
            made.impl.forward(made.layer, q, None, None, cache, step, out)
    assert np.isnan(step_path.host(made.output)).all()


def test_refused_steps_write_nothing(step_path):
    made = Made(step_path, Case(((1, 20),)), dcp_world_size=2)
    ranks = made.builder.build(0, made.common)
    plain = replace(ranks, dcp_context_kv_lens=None, scheduler_metadata=None)
    calls = [
        (replace(ranks, dcp_group=object()), {}, "key is None"),
        (plain, {"output_scale": np.ones(1, np.float32)}, "output_scale"),
        (plain, {"output_block_scale": np.ones(1, np.float32)}, "output_scale"),
    ]
    for metadata, options, match in calls:
        with pytest.raises(NotImplementedError, match=match):
            made.impl.forward(
                made.layer, made.query, None, None, made.cache, metadata, made.output, **options
            )
    with pytest.raises(ValueError, match="without a dcp_group"):
        made.impl.forward(
            made.layer, made.query, None, None, made.cache, ranks, made.output
        )  # fmt: skip
    made.impl.need_to_return_lse_for_decode = True
    with pytest.raises(NotImplementedError, match="no LSE"):
        made.impl.forward(
            made.layer, made.query, None, None, made.cache,
            replace(plain, use_cascade=True), made.output,
        )  # fmt: skip
    assert np.isnan(step_path.host(made.output)).all()


@pytest.mark.parametrize("shape", [(3, 5, 16, 1, 64), (2, 5, 16, 1, 32), (5, 1, 16, 64)])
def test_caches_of_another_shape_are_refused(step_path, shape):
    made = Made(step_path, Case(((1, 0),)))
    metadata = made.builder.build(0, made.common)
    made.cache = step_path.array(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="kv_cache has shape"):
        made.run(metadata)
