"""Multi-head latent attention through the public functions, on every path that has it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.explain import explain
from cupyflash.latent_cache import split_latent_cache
from cupyflash.mla import mla_decode
from cupyflash.testing import POISON_INDEX, Case, expect_attention
from cupyflash.testing.requests import to_numpy
from cupyflash.testing.strategies import cases

BF16 = np.dtype(ml_dtypes.bfloat16)

CASE = Case(
    lengths=((1, 37), (2, 20), (0, 9), (3, -1), (4, 60), (1, -1)), group_size=16, head_dim=64,
    head_dim_v=512, page_size=16, causal=True, q_v=True, q_type="bf16", kv_type="bf16",
)  # fmt: skip

# Lengths of decode steps, speculative ones too, and now and then a short prefill.
LENGTHS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 4), st.sampled_from([1, 1, 7, 40])),
        st.one_of(st.integers(-5, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 129, 200])),
    ),
    min_size=1,
    max_size=4,
).map(tuple)

LATENT = cases(
    lengths=LENGTHS,
    q_v=True,
    num_heads_kv=st.sampled_from([1, 1, 1, 2]),
    group_size=st.sampled_from([16, 1, 3, 8, 17, 40]),
    head_dim=st.sampled_from([64, 64, 8, 32]),
    head_dim_v=st.sampled_from([512, 512, 64, 256, 72]),
    page_size=st.sampled_from([64, 16, 1, 32, 128, None]),
    q_type="bf16",
    kv_type="bf16",
)


def on_types_of(path, case):
    """float32 attention is NumPy's alone."""
    if path.name == "numpy":
        return case.replace(q_type="fp32", kv_type="fp32")
    return case.replace(q_type="fp16", kv_type="fp16")


def decode(case, xp=np):
    """The same as arguments of `mla_decode`."""
    inputs = case.make(xp)
    args = dict(inputs.args)
    args["q_nope"], args["q_pe"] = args.pop("q_v"), args.pop("q")
    args["kv_cache"] = inputs.placed["kv"].view
    for name in ("k", "v", "softcap"):
        args.pop(name)
    return inputs, args


@given(case=LATENT)
def test_any_ragged_batch(latent_path, case):
    case.make(latent_path.xp).check(flash_attn_varlen_func)


@given(case=LATENT)
def test_any_ragged_batch_in_the_other_type(latent_path, case):
    on_types_of(latent_path, case).make(latent_path.xp).check(flash_attn_varlen_func)


@given(case=LATENT, descale=st.booleans())
def test_any_ragged_batch_of_8_bit_latents(latent_path, case, descale):
    case = on_types_of(latent_path, case) if case.seed % 2 else case
    case = case.replace(kv_type="e4m3", descale=descale)
    case.make(latent_path.xp).check(flash_attn_varlen_func)


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_any_number_of_heads_over_any_page(latent_path, heads, page):
    CASE.replace(group_size=heads, page_size=page).make(latent_path.xp).check(
        flash_attn_varlen_func
    )


@pytest.mark.parametrize("used", [0, 1, 15, 16, 17, 63, 64, 65])
def test_lengths_around_the_page(latent_path, used):
    case = CASE.replace(lengths=((1, used - 1), (2, used - 2), (1, 130)))
    case.make(latent_path.xp).check(flash_attn_varlen_func)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 5])
def test_splits(latent_path, num_splits):
    case = CASE.replace(lengths=((1, 700), (2, 61), (1, 0), (4, 300)), sink=True)
    case.make(latent_path.xp).check(flash_attn_varlen_func, num_splits=num_splits)


@pytest.mark.parametrize("rank", [3, 4])
def test_mla_decode_is_the_same_call(latent_path, rank):
    inputs, args = decode(CASE, latent_path.xp)
    right = inputs.call(flash_attn_varlen_func)
    if rank == 3:
        args["kv_cache"] = args["kv_cache"][:, :, 0]
    out, lse = mla_decode(**args, return_softmax_lse=True)
    rows = sum(CASE.q_lens)
    assert to_numpy(out)[:rows].tobytes() == right[0][:rows].tobytes()
    assert to_numpy(lse)[:, :rows].tobytes() == right[1][:, :rows].tobytes()


def test_a_row_that_sees_no_key(latent_path):
    case = CASE.replace(lengths=((3, -2), (2, -2)))
    out, lse = case.make(latent_path.xp).call(flash_attn_varlen_func)
    assert not out[:2].any()
    assert not out[3:5].any()
    assert np.isneginf(lse[:, :2]).all()
    assert out[2].any()


def test_pages_and_requests_may_come_in_any_order(latent_path):
    xp, rng = latent_path.xp, np.random.default_rng(5)
    inputs = CASE.make(xp)
    right = inputs.call(flash_attn_varlen_func)
    cache, table = to_numpy(inputs.placed["kv"].view), to_numpy(inputs.args["block_table"])
    order = rng.permutation(len(cache))
    moved = xp.asarray(np.ascontiguousarray(cache[np.argsort(order)]))
    other = np.where(table == POISON_INDEX, POISON_INDEX, order[table % len(cache)])
    inputs.args["v"], inputs.args["k"] = split_latent_cache(moved, 512)
    inputs.args["block_table"] = xp.asarray(other.astype(np.int32))
    again = inputs.call(flash_attn_varlen_func)
    assert [a.tobytes() for a in again] == [a.tobytes() for a in right]


def test_the_same_bits_every_time(latent_path):
    inputs = CASE.make(latent_path.xp)
    first, second = (inputs.call(flash_attn_varlen_func) for _ in range(2))
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


def test_the_explanation_counts_a_cache_row_once():
    case = CASE.replace(lengths=((1, 99),))
    found = explain(**case.make().args)
    rows, keys, heads = 1, 100, 16
    assert found.flops == 2 * keys * heads * (64 + 512 + 512)
    per_row = heads * (64 + 512 + 512) * 2
    assert found.bytes_moved == keys * 576 * 2 + rows * per_row


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q_pe": np.zeros((4, 2, 32), np.float16)}, ValueError, "rows of 576, .* must be 544"),
        ({"kv_cache": np.zeros((2, 16, 2, 576), np.float16)}, ValueError, r"block_size, 1, latent"),
        ({"kv_cache": np.zeros((2, 16, 576), BF16)}, TypeError, "q is fp16, k and v are bf16"),
        ({"softmax_scale": None}, ValueError, "softmax_scale is None: with q_v"),
        ({"q_nope": np.zeros((3, 2, 512), np.float16)}, ValueError, r"q_v has shape \(3, 2, 512\)"),
        ({"kv_cache": [1]}, TypeError, "kv_cache is list; pass a NumPy or CuPy array"),
        ({"block_table": None}, ValueError, "cu_seqlens_k is missing"),
    ],
)
def test_bad_input(change, error, words):
    args = {
        "q_nope": np.zeros((4, 2, 512), np.float16),
        "q_pe": np.zeros((4, 2, 64), np.float16),
        "kv_cache": np.zeros((2, 16, 1, 576), np.float16),
        "block_table": np.zeros((2, 2), np.int32),
        "seqused_k": np.array([5, 20], np.int32),
        "cu_seqlens_q": np.array([0, 1, 4], np.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 20,
        "softmax_scale": 0.1,
    }
    assert mla_decode(**args).shape == (4, 2, 512)
    with pytest.raises(error, match=words):
        mla_decode(**{**args, **change})


@pytest.mark.parametrize(
    ("dims", "words"),
    [((72, 512), "72 of q and k with q_v: .* nearest is 64"), ((64, 520), "520 .* is 512")],
)
def test_head_sizes(dims, words):
    with pytest.raises(ValueError, match=words):
        CASE.replace(head_dim=dims[0], head_dim_v=dims[1]).make().call(flash_attn_varlen_func)


@pytest.mark.parametrize("changes", [{"kv_type": "e5m2"}, {"q_type": "e4m3", "kv_type": "e4m3"}])
def test_8_bit_queries_and_e5m2_are_refused(changes):
    inputs = CASE.replace(head_dim_v=64, **changes).make()
    with pytest.raises(NotImplementedError, match=r"q_v with q in .* and v in e"):
        inputs.call(flash_attn_varlen_func)


@pytest.mark.parametrize("scale", [0.5, "array", "request"])
def test_a_cache_of_8_bits_that_was_written_with_a_scale(latent_path, scale):
    """Written, then read with the same scale: as the 16-bit rows that it stands for."""
    xp, rng = latent_path.xp, np.random.default_rng(3)
    tokens, heads = 70, 16
    rows = rng.standard_normal((tokens, 576)).astype(np.float16)
    cache = xp.zeros((6, 16, 1, 576), np.uint8)
    slots = rng.permutation(6 * 16)[:tokens]
    table = xp.arange(6, dtype=np.int32)[None]
    cupyflash.concat_and_cache_mla(
        xp.asarray(rows[:, :512]), xp.asarray(rows[:, None, 512:]), cache, xp.asarray(slots),
        "fp8", 0.5,
    )  # fmt: skip
    wide = to_numpy(cache).view(ml_dtypes.float8_e4m3fn).astype(np.float16) * np.float16(0.5)
    q = rng.standard_normal((1, heads, 576)).astype(np.float16)
    descale = {0.5: 0.5, "array": xp.full(1, 0.5, np.float32),
               "request": xp.full((1, 1), 0.5, np.float32)}[scale]  # fmt: skip
    options = {
        "cu_seqlens_q": xp.asarray(np.array([0, 1], np.int32)), "max_seqlen_q": 1,
        "max_seqlen_k": 96, "softmax_scale": 0.07,
    }  # fmt: skip
    used = xp.asarray(np.array([96], np.int32))
    args = (xp.asarray(q[..., :512].copy()), xp.asarray(q[..., 512:].copy()))
    found = mla_decode(*args, cache, table, used, kv_descale=descale, **options)
    expect_attention(
        q=q[..., 512:], k=wide[..., 512:], v=wide[..., :512], q_v=q[..., :512], seqused_k=used,
        block_table=table, causal=True, **options,
    ).check(to_numpy(found))  # fmt: skip


def test_a_descale_of_a_16_bit_cache_is_refused():
    _, args = decode(CASE)
    with pytest.raises(ValueError, match="k_descale given, but k is bf16"):
        mla_decode(**args, kv_descale=0.5)


@pytest.mark.parametrize("heads", [16, 64])
def test_bounds_and_schedules_of_latent_calls(latent_path, heads):
    case = CASE.replace(lengths=((1, 40), (1, 70)), group_size=heads)
    inputs, args = decode(case, latent_path.xp)
    schedule = cupyflash.get_scheduler_metadata(
        2, 1, 71, heads, 1, 64, args["seqused_k"], "bfloat16", 512, args["cu_seqlens_q"], 16,
        causal=True,
    )  # fmt: skip
    inputs.check(flash_attn_varlen_func, scheduler_metadata=schedule)
    bounds = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 71, "num_heads_q": 16,
              "num_heads_kv": 1, "headdim": 64, "headdim_v": 512}  # fmt: skip
    assert cupyflash.AttentionBounds(**bounds, q_v=True).problem().has_q_v
    with pytest.raises(ValueError, match="head size 512 of v"):
        cupyflash.AttentionBounds(**bounds)
