"""Types, configuration and cache layouts of the backend layer."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from cupyflash.backend import (
    AttentionCGSupport,
    AttentionType,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
    MultipleOf,
)
from cupyflash.backends import (
    ChunkedLocalAttentionBuilder,
    CrossAttentionBuilder,
    FlashAttentionBackend,
    FlashAttentionMetadataBuilder,
    ReferenceBackend,
)
from cupyflash.backends.kv_layout import (
    empty_kv_cache,
    kv_cache_stride_order,
    packed_kv_cache_stride_order,
    split_kv_cache,
)
from cupyflash.backends.window import sliding_window_of, symmetrize_window
from cupyflash.runtime.dtypes import BF16, E4M3, E5M2, FP16


def test_graph_support_is_ordered_and_labelled():
    support = AttentionCGSupport
    order = (
        *(support.ALWAYS, support.UNIFORM_BATCH),
        *(support.UNIFORM_SINGLE_TOKEN_DECODE, support.NEVER),
    )
    assert list(order) == sorted(support, reverse=True)
    assert [level.label for level in order] == ["always", "uniform", "uniform", "never"]


def test_builders_say_which_graphs_they_serve():
    found = {
        builder: builder.get_cudagraph_support()
        for builder in (
            *(FlashAttentionMetadataBuilder, ChunkedLocalAttentionBuilder),
            *(CrossAttentionBuilder, ReferenceBackend.get_builder_cls()),
        )
    }
    always = [b for b, level in found.items() if level is AttentionCGSupport.ALWAYS]
    assert always == [FlashAttentionMetadataBuilder]
    assert set(found.values()) == {AttentionCGSupport.ALWAYS, AttentionCGSupport.NEVER}


def test_attention_types_are_their_names():
    names = [kind.value for kind in AttentionType]
    assert names == ["decoder", "encoder", "encoder_only", "encoder_decoder"]
    assert AttentionType("encoder_only") is AttentionType.ENCODER_ONLY


def test_the_backend_says_what_it_is():
    backend = FlashAttentionBackend
    assert backend.get_name() == "FLASH_ATTN"
    assert backend.accept_output_buffer
    assert not backend.forward_includes_kv_cache_update
    assert backend.supported_dtypes == (FP16, BF16)
    assert backend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert backend.get_kv_cache_shape(7, 32, 4, 128) == (2, 7, 32, 4, 128)
    assert backend.get_impl_cls().__name__ == "FlashAttentionImpl"
    assert backend.get_builder_cls() is FlashAttentionMetadataBuilder
    assert backend.supports_sink()
    assert all(backend.supports_attn_type(kind) for kind in AttentionType)
    assert not backend.supports_attn_type("decoder_only")


@pytest.mark.parametrize(
    ("method", "yes", "no"),
    [
        ("supports_head_size", [8, 40, 72, 120, 256], [0, -8, 4, 100, 264, 512]),
        ("supports_block_size", [None, 16, 48, 512], [0, -16, 8, 24]),
        ("supports_compute_capability", [None, (8, 0), (9, 0), (12, 0)], [(7, 5), (6, 1)]),
        ("supports_dtype", ["float16", "bf16", np.float16, ml_dtypes.bfloat16], ["fp32", "int8"]),
        (
            "supports_kv_cache_dtype",
            [None, "auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
            ["int8", "nvfp4", "fp8_ds_mla"],
        ),
    ],
)
def test_what_the_backend_supports(method, yes, no):
    supports = getattr(FlashAttentionBackend, method)
    assert [value for value in (*yes, *no) if supports(value)] == yes


def test_cache_blocks_are_multiples_of_16():
    with pytest.raises(ValueError, match=r"block_size=24 .* nearest is 32"):
        FlashAttentionBackend.get_kv_cache_shape(7, 24, 4, 128)


@pytest.mark.parametrize(
    ("window", "kind", "reach"),
    [
        (None, AttentionType.DECODER, (-1, -1)),
        (1, AttentionType.DECODER, (0, 0)),
        (256, AttentionType.DECODER, (255, 0)),
        (256, AttentionType.ENCODER, (255, 0)),
        (256, AttentionType.ENCODER_ONLY, (255, 255)),
    ],
)
def test_a_window_counts_the_query_itself(window, kind, reach):
    assert sliding_window_of(window, kind) == reach


@pytest.mark.parametrize(
    ("window", "causal", "seen"),
    [
        ((15, 0), True, (15, 0)),
        ((15, 0), False, (15, 15)),
        ((0, 0), False, (0, 0)),
        ((-1, -1), False, (-1, -1)),
        ((-1, 0), False, (-1, 0)),
        ((7, 3), False, (7, 3)),
    ],
)
def test_a_window_to_the_left_looks_both_ways_without_a_causal_mask(window, causal, seen):
    assert symmetrize_window(window, causal) == seen


# Layouts: what is one step in memory for each axis of the view.


@pytest.mark.parametrize(("layout", "order"), [("NHD", (0, 1, 2, 3, 4)), ("HND", (0, 1, 3, 2, 4))])
def test_separate_caches_in_memory(layout, order):
    assert FlashAttentionBackend.get_kv_cache_stride_order(layout) == order
    cache = empty_kv_cache((2, 3, 16, 4, 8), kv_cache_stride_order(layout), np.float16)
    assert cache.shape == (2, 3, 16, 4, 8)
    token, head = (4 * 8, 8) if layout == "NHD" else (8, 16 * 8)
    assert cache.strides == tuple(2 * n for n in (3 * 512, 512, token, head, 1))


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("LBHNC", (0, 1, 2, 3, 4)),
        ("LBNHC", (0, 1, 3, 2, 4)),
        ("LHBNC", (0, 2, 1, 3, 4)),
        ("BLHNC", (1, 0, 2, 3, 4)),
        ("BLNHC", (1, 0, 3, 2, 4)),
        ("BHLNC", (1, 2, 0, 3, 4)),
        ("NHD", (0, 1, 3, 2, 4)),
        ("HND", (0, 1, 2, 3, 4)),
    ],
)
def test_packed_caches_in_memory(layout, order):
    """L layers, B blocks, H heads, N tokens, C = a token's key and value."""
    assert packed_kv_cache_stride_order(layout) == order
    shape = (5, 3, 4, 16, 2 * 8)
    cache = empty_kv_cache(shape, order, np.float16)
    assert cache.shape == shape
    physical = [shape[axis] for axis in order]
    for place, axis in enumerate(order):
        assert cache.strides[axis] == 2 * int(np.prod(physical[place + 1 :]))


def test_halves_of_a_cache_are_views():
    separate = np.zeros((2, 3, 16, 4, 8), np.float16)
    packed = np.zeros((3, 4, 16, 16), np.float16)
    for cache in (separate, packed):
        key, value = split_kv_cache(cache, 4, 8)
        assert key.shape == value.shape == (3, 16, 4, 8)
        key[2, 5, 1, 7], value[2, 5, 1, 7] = 1, 2
    assert separate[:, 2, 5, 1, 7].tolist() == [1, 2]
    assert packed[2, 1, 5, [7, 15]].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: kv_cache_stride_order("HDN"), "NHD, HND"),
        (lambda: packed_kv_cache_stride_order("LBCHN"), "LBHNC"),
        (lambda: split_kv_cache(np.zeros((3, 4, 16, 8)), 4, 8), "kv_cache has shape"),
        (lambda: split_kv_cache(np.zeros((3, 2, 16, 4, 8)), 4, 8), "kv_cache has shape"),
        (lambda: KVCacheSpec(0, 1, 64, "fp16"), "at least 1"),
        (lambda: KVCacheSpec(16, 1, 64, "fp16", "int4"), "fp8"),
        (lambda: KVCacheSpec(16, 1, 64, "fp16", "auto", 24), "nearest is 32"),
        (lambda: BackendConfig(max_num_seqs=0), "max_num_seqs=0"),
        (lambda: BackendConfig(max_num_seqs=1, dcp_world_size=2, dcp_rank=2), "dcp_rank=2"),
        (lambda: BackendConfig(max_num_seqs=1, max_num_splits_for_cuda_graph=0), "splits"),
        (lambda: BackendConfig(max_num_seqs=1, cascade_policy="always"), "use 'vllm'"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [("auto", BF16), ("float16", FP16), ("fp8", E4M3), ("fp8_e5m2", E5M2)],
)
def test_what_a_cache_holds(spelling, kind):
    assert KVCacheSpec(16, 1, 64, "bfloat16", spelling).storage_type is kind


def common(**changes):
    given = {
        "query_start_loc": np.array([0, 1, 4, 4], np.int32),
        "seq_lens": np.array([9, 3, 0], np.int32),
        "num_reqs": 3,
        "num_actual_tokens": 6,
        "max_query_len": 3,
        "max_seq_len": 9,
        "block_table_tensor": np.zeros((3, 2), np.int32),
        "slot_mapping": np.arange(6),
    }
    return CommonAttentionMetadata(**{**given, **changes})


def test_unpadded_steps_keep_the_first_requests_and_tokens():
    whole = common(encoder_seq_lens=np.array([1, 2, 0], np.int32))
    step = whole.unpadded(4, 2)
    assert step.query_start_loc.tolist() == [0, 1, 4]
    assert step.seq_lens.tolist() == [9, 3]
    assert step.encoder_seq_lens.tolist() == [1, 2]
    assert step.slot_mapping.tolist() == [0, 1, 2, 3]
    assert (step.num_reqs, step.num_actual_tokens) == (2, 4)
    assert step.block_table_tensor.base is whole.block_table_tensor
    assert step.compute_num_computed_tokens().tolist() == [8, 0]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"seq_lens": np.zeros(3, np.int64)}, TypeError, "seq_lens is int64"),
        ({"seq_lens": np.zeros(2, np.int32)}, ValueError, "num_reqs=3 makes it 3"),
        ({"query_start_loc": np.zeros(3, np.int32)}, ValueError, "makes it 4"),
        ({"block_table_tensor": np.zeros((2, 2), np.int32)}, ValueError, "block_table_tensor"),
        ({"seq_lens_cpu": [1, 2, 3]}, ValueError, "NumPy array"),
        ({"causal": np.ones(3, np.int32)}, NotImplementedError, "two steps"),
    ],
)
def test_steps_that_contradict_themselves_are_refused(changes, error, match):
    with pytest.raises(error, match=match):
        common(**changes)


def test_no_host_copy_is_made_behind_the_engines_back():
    class OnDevice:
        dtype, shape = np.dtype(np.int32), (3,)

    step = common(seq_lens=OnDevice())
    with pytest.raises(ValueError, match="pass seq_lens_cpu"):
        step.on_host("seq_lens")
    copy = np.array([9, 3, 0], np.int32)
    assert common(seq_lens=OnDevice(), seq_lens_cpu=copy).on_host("seq_lens") is copy


def test_numpy_steps_need_no_cupy():
    script = """
import sys
sys.modules["cupy"] = None
import numpy as np
from cupyflash.backend import *
from cupyflash.backends import *
impl = FlashAttentionImpl(2, 64, 0.1, 1)
config = BackendConfig(max_num_seqs=1, layers={"a": impl})
builder = FlashAttentionMetadataBuilder(KVCacheSpec(16, 1, 64, "float32"), ["a"], config)
i32 = lambda *x: np.array(x, np.int32)
step = CommonAttentionMetadata(
    query_start_loc=i32(0, 2), seq_lens=i32(2), num_reqs=1, num_actual_tokens=2,
    max_query_len=2, max_seq_len=2, block_table_tensor=i32(1).reshape(1, 1),
    slot_mapping=np.array([16, 17]))
cache = np.full((2, 2, 16, 1, 64), np.nan, np.float32)
one = np.ones((2, 1, 64), np.float32)
impl.do_kv_cache_update(None, one, one, cache, step.slot_mapping)
out = np.full((2, 2, 64), np.nan, np.float32)
impl.forward(None, np.ones((2, 2, 64), np.float32), one, one, cache, builder.build(0, step), out)
assert (out == 1).all()
config = AttentionSelectorConfig(head_size=64, dtype="float32")
assert get_attn_backend(config, None).get_name() == "REFERENCE"
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
