"""The backend of latent attention: decoding absorbed, prefill expanded, both the same layer."""

from __future__ import annotations

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.backend import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.backends import (
    MLABackend,
    MLAImpl,
    MLAMetadataBuilder,
    get_attn_backend,
    unsupported_reasons,
)
from cupyflash.testing import POISON_INDEX, assert_within, attention_oracle
from cupyflash.testing.requests import to_numpy

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, LATENT, NOPE, ROPE, DIM_V, BLOCK = 4, 64, 32, 16, 24, 16
SCALE = (NOPE + ROPE) ** -0.5


def config(**changes):
    given = {"head_size": 576, "dtype": "bfloat16", "use_mla": True}
    return AttentionSelectorConfig(**{**given, **changes})


class Layer:
    """A layer with the cache of some requests, whose first tokens are stored already."""

    def __init__(
        self, lengths, dtype=np.float32, xp=np, seed=0, threshold=128, room=64 * 1024, cache="auto"
    ):
        self.lengths, self.xp, self.dtype = lengths, xp, np.dtype(dtype)
        rng = np.random.default_rng(seed)
        weight = rng.standard_normal((LATENT, HEADS * (NOPE + DIM_V))) * LATENT**-0.5
        self.weight = weight.astype(dtype)
        self.layer = SimpleNamespace(_k_scale=0.25)
        self.impl = MLAImpl(
            HEADS, LATENT + ROPE, SCALE, 1, cache, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE, v_head_dim=DIM_V, kv_b_proj=xp.asarray(self.weight),
        )  # fmt: skip
        self.config = BackendConfig(max_num_seqs=16, layers={"a": self.impl})
        spec = KVCacheSpec(BLOCK, 1, LATENT + ROPE, self.dtype.name)
        builder = type("Builder", (MLAMetadataBuilder,), {"reorder_batch_threshold": threshold})
        self.builder = builder(spec, ["a"], self.config)
        self.builder.context_chunk_tokens = room
        self.rows = [rng.standard_normal((q + c, LATENT + ROPE)).astype(dtype) for q, c in lengths]
        self.query = [rng.standard_normal((q, HEADS, NOPE + ROPE)).astype(dtype)
                      for q, _ in lengths]  # fmt: skip

    def common(self):
        q_lens, kv_lens = [q for q, _ in self.lengths], [q + c for q, c in self.lengths]
        counts = [-(-n // BLOCK) for n in kv_lens]
        order = np.random.default_rng(1).permutation(sum(counts) + 2)
        table = np.full((len(counts), max(counts) + 1), POISON_INDEX, np.int32)
        slots, taken = [], 0
        for i, kv_len in enumerate(kv_lens):
            table[i, : counts[i]] = order[taken : taken + counts[i]]
            taken += counts[i]
            token = np.arange(kv_len)
            slots.append(table[i, token // BLOCK].astype(np.int64) * BLOCK + token % BLOCK)
        shape = MLABackend.get_kv_cache_shape(len(order), BLOCK, 1, LATENT + ROPE)
        fill = (
            np.full(shape, 0x7F, np.uint8) if self.impl.fp8 else np.full(shape, np.nan, self.dtype)
        )
        self.cache = self.xp.asarray(fill)
        self._store(self.rows, np.concatenate(slots))
        new = np.concatenate([s[len(s) - q :] for s, q in zip(slots, q_lens, strict=True)])
        starts = np.cumsum([0, *q_lens]).astype(np.int32)
        used = np.array(kv_lens, np.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.xp.asarray(starts), seq_lens=self.xp.asarray(used),
            num_reqs=len(q_lens), num_actual_tokens=int(starts[-1]), max_query_len=max(q_lens),
            max_seq_len=max(kv_lens), block_table_tensor=self.xp.asarray(table),
            slot_mapping=self.xp.asarray(new), query_start_loc_cpu=starts, seq_lens_cpu=used,
        )  # fmt: skip

    def _store(self, rows, slots):
        rows, xp = np.concatenate(rows), self.xp
        new = xp.asarray(rows[:, :LATENT].copy()), xp.asarray(rows[:, None, LATENT:].copy())
        self.impl.do_kv_cache_update(self.layer, *new, self.cache, xp.asarray(slots))

    def run(self, padding=2):
        step = self.builder.build(0, self.common())
        query = np.concatenate([*self.query, np.full((padding, *self.query[0].shape[1:]), np.nan)])
        new = np.concatenate([r[len(r) - q :] for r, (q, _) in zip(self.rows, self.lengths,
                                                                  strict=True)])  # fmt: skip
        out = self.xp.asarray(np.full((len(query), HEADS * DIM_V), np.nan, self.dtype))
        found = self.impl.forward(
            self.layer, self.xp.asarray(query.astype(self.dtype)), self.xp.asarray(new[:, :LATENT]),
            self.xp.asarray(new[:, None, LATENT:]), self.cache, step, out,
        )  # fmt: skip
        assert found is out
        host = to_numpy(out)
        assert np.isnan(host[len(query) - padding :].astype(np.float32)).all()
        return host[: len(query) - padding].reshape(-1, HEADS, DIM_V), step

    def stored(self):
        """The rows as the cache has them: those of the context, or all where none are expanded."""
        if not self.impl.fp8:
            return self.rows
        kind = ml_dtypes.float8_e4m3fn
        return [(r.astype(np.float32) / 0.25).astype(kind).astype(np.float32) * 0.25
                for r in self.rows]  # fmt: skip

    def right(self, new_from_cache=True):
        """Expanded in float64, request by request."""
        outs = []
        weight = self.weight.astype(np.float64).reshape(LATENT, HEADS, NOPE + DIM_V)
        for rows, new, query in zip(self.stored(), self.rows, self.query, strict=True):
            if not new_from_cache:
                first = len(rows) - len(query)
                rows = np.concatenate([rows[:first], new[first:]])
            both = np.einsum("tl,lhd->thd", rows[:, :LATENT].astype(np.float64), weight)
            rope = np.broadcast_to(
                rows[:, None, LATENT:].astype(np.float64), (len(rows), HEADS, ROPE)
            )
            keys = np.concatenate([both[..., :NOPE], rope], -1)
            outs.append(
                attention_oracle(query, keys, both[..., NOPE:], softmax_scale=SCALE, causal=True)[0]
            )
        return np.concatenate(outs)


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=4).filter(
    lambda lengths: any(q for q, _ in lengths)
)


@settings(max_examples=40)
@given(
    lengths=LENGTHS, threshold=st.sampled_from([0, 1, 4, 9]), room=st.sampled_from([16, 40, 999])
)
def test_any_split_of_a_step_gives_the_same(lengths, threshold, room):
    """Whatever is decoded and whatever is expanded, in chunks of any size."""
    layer = Layer(tuple(lengths), threshold=threshold, room=room)
    found, _ = layer.run()
    np.testing.assert_allclose(found, layer.right(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("threshold", [0, 128], ids=["expanded", "absorbed"])
def test_16_bits(latent_path, dtype, threshold):
    """Absorbed or expanded, within twice the error of expanding on NumPy in this type."""
    lengths = ((1, 40), (3, 17), (7, 0))
    layer = Layer(lengths, dtype, latent_path.xp, threshold=threshold, room=32)
    baseline, _ = Layer(lengths, dtype, threshold=0).run()
    found, _ = layer.run()
    assert_within(found, layer.right(), baseline)


@pytest.mark.parametrize("threshold", [0, 128], ids=["expanded", "absorbed"])
def test_8_bit_caches(latent_path, threshold):
    """Rows that come from the cache are as it has them; those of new tokens as they were given."""
    lengths = ((1, 40), (3, 17), (7, 30))
    options = {"threshold": threshold, "room": 32}
    layer = Layer(lengths, np.float16, latent_path.xp, cache="fp8", **options)
    found, _ = layer.run()
    right = layer.right(new_from_cache=threshold > 0)
    baseline, _ = Layer(lengths, np.float16, cache="fp8", **options).run()
    assert_within(found, right, baseline)
    np.testing.assert_allclose(baseline.astype(np.float32), right, rtol=2e-2, atol=1e-2)


def test_requests_are_decoded_up_to_the_first_long_one():
    layer = Layer(((1, 30), (2, 5), (6, 40), (1, 3), (9, 0)), threshold=2, room=32)
    _, step = layer.run()
    assert (step.decode.num_tokens, len(step.decode.seq_lens)) == (3, 2)
    assert step.decode.max_query_len == 2
    assert step.prefill.max_query_len == 9
    assert step.prefill.query_start_loc.tolist() == [0, 6, 7, 16]
    # 32 tokens for two contexts (40 and 3): 16 each.
    assert [chunk.cu_seqlens.tolist() for chunk in step.prefill.context] == [
        [0, 16, 19, 19], [0, 16, 16, 16], [0, 8, 8, 8],
    ]  # fmt: skip
    assert [chunk.starts.tolist() for chunk in step.prefill.context] == [
        [0] * 3,
        [16] * 3,
        [32] * 3,
    ]


def test_a_decode_step_needs_no_host_copies():
    layer = Layer(((1, 30), (1, 5)))
    common = layer.common()
    hidden = SimpleNamespace(**{name: getattr(common, name) for name in common.__slots__},
                             on_host=None)  # fmt: skip
    step = layer.builder.build(0, hidden)
    assert step.prefill is None
    assert step.decode.seq_lens is common.seq_lens or (step.decode.seq_lens == [31, 6]).all()


def test_graphs_hold_decode_steps_only():
    layer = Layer(((1, 30), (4, 5)), threshold=2)
    assert MLAMetadataBuilder.get_cudagraph_support() is AttentionCGSupport.UNIFORM_BATCH
    with pytest.raises(ValueError, match=r"max_query_len=4: .* at most 2 queries"):
        layer.builder.build_for_cudagraph_capture(layer.common())
    short = Layer(((1, 30), (1, 5)))
    assert short.builder.build_for_cudagraph_capture(short.common()).prefill is None


def test_another_group_has_other_blocks():
    layer = Layer(((1, 30), (6, 40)), threshold=2)
    step = layer.builder.build(0, layer.common())
    table, slots = np.zeros((2, 5), np.int32), np.arange(7)
    found = layer.builder.update_block_table(step, table, slots)
    assert found.decode.block_table.shape == found.prefill.block_table.shape == (1, 5)
    assert found.slot_mapping is slots
    assert step.slot_mapping is not slots


def test_profiling_writes_zeros():
    layer = Layer(((1, 1),))
    out = np.ones((3, HEADS * DIM_V), np.float32)
    assert layer.impl.forward(None, None, None, None, None, None, out) is out
    assert not out.any()


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (12, 0)])
def test_latent_models_get_this_backend(capability):
    assert get_attn_backend(config(), capability) is MLABackend
    assert get_attn_backend(config(kv_cache_dtype="fp8"), capability) is MLABackend
    assert unsupported_reasons(config(), capability)["FLASH_ATTN"]
    assert get_attn_backend(config(use_mla=False, head_size=64), capability) is not MLABackend


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_mla": False}, "use_mla is not set"),
        ({"has_sink": True}, "no sinks"),
        ({"has_sliding_window": True}, "no sliding window"),
        ({"use_alibi": True}, "no ALiBi"),
        ({"head_size": 64}, "head_size=64 .* from 72 to 576"),
        ({"head_size": 584}, "head_size=584"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is neither the model's nor"),
        ({"kv_cache_dtype": "float16"}, "is neither the model's nor e4m3; use 'auto' or 'fp8'"),
        ({"dtype": "float32"}, "dtype=float32 is not one of fp16, bf16"),
        ({"block_size": 24}, "block_size=24"),
        ({"attn_type": "encoder"}, "attn_type='encoder' is not decoder"),
    ],
)
def test_what_it_refuses(changes, words):
    (reason,) = unsupported_reasons(config(**changes), (9, 0))["FLASH_ATTN_MLA"]
    assert re.search(words, reason), reason


def test_numpy_takes_float32_and_old_gpus_are_refused():
    assert get_attn_backend(config(dtype="float32"), None) is MLABackend
    with pytest.raises(ValueError, match=r"compute capability 7.5 is below 8.0"):
        get_attn_backend(config(), (7, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 2}, "a latent cache has 1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "a latent cache of 8 bits is e4m3"),
        ({"head_size": 64}, r"kv_lora_rank \+ qk_rope_head_dim = 80"),
        ({"kv_b_proj": np.zeros((64, 10))}, r"kv_b_proj has shape \(64, 10\).*\[64, 224\]"),
    ],
)
def test_layers_that_do_not_fit(changes, words):
    given = {"num_heads": HEADS, "head_size": LATENT + ROPE, "scale": 1.0, "kv_lora_rank": LATENT,
             "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": DIM_V,
             "kv_b_proj": np.zeros((LATENT, HEADS * (NOPE + DIM_V)))}  # fmt: skip
    with pytest.raises(ValueError, match=words):
        MLAImpl(**{**given, **changes})


def test_options_that_there_are_not():
    layer = Layer(((1, 3),))
    out = np.zeros((1, HEADS * DIM_V), np.float32)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.impl.forward(None, None, None, None, None, None, out, output_scale=1.0)
    with pytest.raises(ValueError, match="common_prefix_len=16"):
        layer.builder.build(16, layer.common())
    with pytest.raises(ValueError, match="num_kv_heads=2: a latent cache has 1"):
        MLABackend.get_kv_cache_shape(1, 16, 2, 576)
    with pytest.raises(ValueError, match=r"block_size=24 .* nearest is 32"):
        MLABackend.get_kv_cache_shape(1, 24, 1, 576)
    layer.impl.need_to_return_lse_for_decode = True
    with pytest.raises(NotImplementedError, match="need_to_return_lse_for_decode"):
        layer.impl.forward(None, None, None, None, None, None, out)
