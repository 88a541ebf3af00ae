"""Whatever is passed, a public function answers or refuses: no other error, no hang."""

from __future__ import annotations

import contextlib
import inspect

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyflash as cf

TYPES = (np.float16, np.float32, ml_dtypes.bfloat16)


def ones(*shape, dtype=np.float16):
    return np.ones(shape, dtype)


def starts(*lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def varlen(n, heads, dim, dtype):
    q, k = ones(n, heads, dim, dtype=dtype), ones(2 * n, heads, dim, dtype=dtype)
    return {
        "q": q, "k": k, "v": k, "max_seqlen_q": n, "cu_seqlens_q": starts(n), "causal": True,
        "max_seqlen_k": 2 * n, "cu_seqlens_k": starts(2 * n), "return_softmax_lse": True,
    }  # fmt: skip


def paged(n, heads, dim, dtype):
    cache = ones(4, 4, heads, dim, dtype=dtype)
    return {
        "q": ones(n, heads, dim, dtype=dtype), "k": cache, "v": cache, "max_seqlen_q": 1,
        "cu_seqlens_q": starts(*[1] * n), "max_seqlen_k": 7, "seqused_k": np.full(n, 7, np.int32),
        "block_table": np.ones((n, 2), np.int32), "window_size": (3, 0), "softcap": 5.0,
    }  # fmt: skip


def write(n, heads, dim, dtype):
    new, cache = ones(n, heads, dim, dtype=dtype), ones(4, 4, heads, dim, dtype=dtype)
    return {
        "key": new, "value": new, "key_cache": cache, "value_cache": cache.copy(),
        "slot_mapping": np.arange(n), "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0,
    }  # fmt: skip


def merge(n, heads, dim, dtype):
    state = ones(n, heads, dim, dtype=dtype), np.zeros((heads, n), np.float32)
    return {
        "output": state[0].copy(), "prefix_output": state[0], "prefix_lse": state[1],
        "suffix_output": state[0], "suffix_lse": state[1], "output_lse": state[1].copy(),
    }  # fmt: skip


def dense(n, heads, dim, dtype):
    q, k = ones(2, n, heads, dim, dtype=dtype), ones(2, n + 3, heads, dim, dtype=dtype)
    return {"q": q, "k": k, "v": k, "causal": True, "window_size": (-1, -1), "softcap": 0.0}


def appended(n, heads, dim, dtype):
    new, cache = ones(n, 1, heads, dim, dtype=dtype), ones(4, 4, heads, dim, dtype=dtype)
    return {
        "q": new, "k_cache": cache, "v_cache": cache.copy(), "k": new, "v": new,
        "cache_seqlens": np.full(n, 2, np.int32), "block_table": np.zeros((n, 2), np.int32),
    }  # fmt: skip


def schedule(n, heads, dim, dtype):
    return {
        "batch_size": n, "max_seqlen_q": 1, "max_seqlen_k": 9, "num_heads_q": heads,
        "num_heads_kv": heads, "headdim": dim, "cache_seqlens": np.full(n, 2, np.int32),
        "qkv_dtype": dtype, "page_size": 4,
    }  # fmt: skip


def latent(n, heads, dim, dtype):
    return {
        "q_nope": ones(n, heads, 512, dtype=dtype), "q_pe": ones(n, heads, 64, dtype=dtype),
        "kv_cache": ones(2, 16, 576, dtype=dtype), "block_table": np.zeros((n, 1), np.int32),
        "seqused_k": np.full(n, 3, np.int32), "cu_seqlens_q": starts(*[1] * n), "max_seqlen_q": 1,
        "max_seqlen_k": 3, "softmax_scale": 0.1,
    }  # fmt: skip


def cascade(n, heads, dim, dtype):
    q, cache = ones(n, heads, dim, dtype=dtype), ones(4, 4, heads, dim, dtype=dtype)
    return {
        "output": q.copy(), "query": q, "key_cache": cache, "value_cache": cache,
        "cu_query_lens": starts(*[1] * n), "max_query_len": 1, "cu_prefix_query_lens": starts(n),
        "prefix_kv_lens": np.array([4], np.int32), "suffix_kv_lens": np.full(n, 2, np.int32),
        "max_kv_len": 6, "softmax_scale": None, "alibi_slopes": None, "sliding_window": None,
        "logits_soft_cap": None, "block_table": np.zeros((n, 2), np.int32),
        "common_prefix_len": 4, "max_num_splits": 0, "fa_version": None,
    }  # fmt: skip


def tree(n, heads, dim, dtype):
    return {
        "block_table": np.zeros((n, 3), np.int32), "seqused_k": np.full(n, 9, np.int32),
        "block_size": 4,
    }  # fmt: skip


def quantized(n, heads, dim, dtype):
    return {"x": ones(n, heads, dim, dtype=dtype), "granularity": "group", "num_heads_kv": heads}


CALLS = [
    (cf.flash_attn_varlen_func, varlen), (cf.flash_attn_varlen_func, paged),
    (cf.reshape_and_cache_flash, write), (cf.merge_attn_states, merge),
    (cf.flash_attn_func, dense), (cf.flash_attn_with_kvcache, appended),
    (cf.get_scheduler_metadata, schedule), (cf.mla_decode, latent),
    (cf.cascade_attention, cascade), (cf.find_prefix_tree, tree), (cf.quantize_fp8, quantized),
    (cf.explain, varlen),
]  # fmt: skip

JUNK = [
    None, -1, 0, 1, 3.5, float("nan"), float("inf"), "x", "", "e4m3", b"x", [], [1, 2], (1,), {},
    object(), True, 2**40, -(2**40), 1 + 2j, np.float32(2), np.int64(7), np.float16(1),
    np.array(3), np.array([]), np.zeros((2, 2)), ones(0, 3), np.zeros(3, np.complex64),
    np.array(["a"]), np.array([None]), ones(1, 2, 3, 4, 5), np.ones(4, bool), slice(None), ...,
]  # fmt: skip

CHANGES = [
    lambda a: a[..., :-1], lambda a: a[1:], lambda a: a.T, lambda a: a[::-1], lambda a: a[None],
    lambda a: a.astype(np.float64), lambda a: a.astype(np.int64), np.ravel, np.negative,
    lambda a: np.broadcast_to(a[:1], a.shape), np.asfortranarray, lambda a: a.astype(object),
]  # fmt: skip


@pytest.mark.parametrize(("function", "make"), CALLS, ids=lambda f: f.__name__)
def test_what_is_changed_is_taken(function, make):
    """The arguments are right as they are, or the property below would see refusals only."""
    function(**make(3, 2, 16, np.float16))


@pytest.mark.parametrize(("function", "make"), CALLS, ids=lambda f: f.__name__)
@given(data=st.data())
def test_whatever_is_passed_is_answered_or_refused(function, make, data):
    sizes = data.draw(st.tuples(st.integers(0, 4), st.sampled_from([1, 2]), st.just(16)))
    right = make(*sizes, data.draw(st.sampled_from(TYPES)))
    arguments = dict(right)
    named = inspect.signature(cf.flash_attn_varlen_func if make is varlen else function).parameters
    names = sorted({*arguments, *named} - {"options", "args", "kwargs"})
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        value = right.get(name)
        if isinstance(value, np.ndarray) and data.draw(st.booleans()):
            change = data.draw(st.sampled_from(CHANGES))
            arguments[name] = change(value) if value.ndim and value.size else value
        else:
            arguments[name] = data.draw(st.sampled_from(JUNK))
    with contextlib.suppress(TypeError, ValueError, NotImplementedError):
        function(**arguments)
