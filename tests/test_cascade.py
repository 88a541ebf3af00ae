"""Cascade attention equals attention, shared or not, and touches only what it owns."""

from __future__ import annotations

import numpy as np
import pytest
from batches import mean_batch, starts
from hypothesis import given
from hypothesis import strategies as st

import cupyflash
from cupyflash.cascade import cascade_attention
from cupyflash.testing import Case, expect_attention

PAGE, PREFIX = 16, 32


def shared_case(**changes):
    """A ragged batch whose first two blocks are the same, and its arguments for one pass."""
    case = Case(
        lengths=((1, 90), (4, 40), (2, 31), (1, 31)), num_heads_kv=2, group_size=2,
        page_size=PAGE, causal=True, softmax_scale=0.125, q_type="bf16", kv_type="bf16",
    ).replace(**changes)  # fmt: skip
    args = case.make().args
    args["block_table"] = args["block_table"].copy()
    args["block_table"][:, : PREFIX // PAGE] = args["block_table"][0, : PREFIX // PAGE]
    return args


def cascade(args, output, **changes):
    rows = int(args["cu_seqlens_q"][-1])
    arguments = {
        "output": output,
        "query": args["q"],
        "key_cache": args["k"],
        "value_cache": args["v"],
        "cu_query_lens": args["cu_seqlens_q"],
        "max_query_len": args["max_seqlen_q"],
        "cu_prefix_query_lens": starts([rows]),
        "prefix_kv_lens": np.array([PREFIX], np.int32),
        "suffix_kv_lens": args["seqused_k"] - np.int32(PREFIX),
        "max_kv_len": args["max_seqlen_k"],
        "softmax_scale": args["softmax_scale"],
        "alibi_slopes": args.get("alibi_slopes"),
        "sliding_window": args["window_size"],
        "logits_soft_cap": args["softcap"],
        "block_table": args["block_table"],
        "common_prefix_len": PREFIX,
        "max_num_splits": 0,
        "fa_version": None,
        **{n: args[n] for n in ("k_descale", "v_descale", "s_aux", "fp8_dtype") if n in args},
        **changes,
    }
    return cascade_attention(**arguments)


def empty_output(args):
    return np.full((*args["q"].shape[:2], args["v"].shape[-1]), np.nan, args["q"].dtype)


def check_cascade(args, **changes):
    output, rows = empty_output(args), int(args["cu_seqlens_q"][-1])
    assert cascade(args, output, **changes) is output
    expect_attention(**args).check(output)
    assert np.isnan(output[rows:].astype(np.float32)).all()


@given(
    sink=st.booleans(), softcap=st.sampled_from((0.0, 5.0)), descale=st.booleans(),
    window=st.sampled_from(((-1, -1), (15, 0), (40, 3))),
    alibi=st.sampled_from(("", "head", "request")),
    kv_type=st.sampled_from(("bf16", "e4m3")), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_cascade_is_attention(sink, softcap, descale, window, alibi, kv_type, seed):
    args = shared_case(
        sink=sink, softcap=softcap, window_size=window, alibi=alibi, kv_type=kv_type, seed=seed,
        descale=descale and kv_type == "e4m3",
    )  # fmt: skip
    check_cascade(args)


def test_shared_descales_keep_the_prefix_shared(monkeypatch):
    passes = []
    whole = cupyflash.flash_attn_varlen_func

    def counted(*args, **kwargs):
        passes.append(kwargs)
        return whole(*args, **kwargs)

    monkeypatch.setattr("cupyflash.cascade_passes.flash_attn_varlen_func", counted)
    args = shared_case(kv_type="e4m3")
    per_head = np.array([[0.5, 2.0]], np.float32)
    shared = (np.broadcast_to(per_head, (4, 2)), 0.5, np.array([2.0], np.float32))
    for k_descale in shared:
        passes.clear()
        args.update(k_descale=k_descale, v_descale=np.broadcast_to(per_head * 3, (4, 2)))
        check_cascade(args)
        assert len(passes) == 2
    passes.clear()
    own = np.repeat(per_head, 4, axis=0)
    own[1] *= 2
    args.update(k_descale=own)
    check_cascade(args)
    assert len(passes) == 1


def test_window_of_a_shared_prefix():
    """Prefix 32, then 8 queries, window (15, 0): row i is the mean of keys 17 + i to 32 + i."""
    q, k, v = mean_batch([8], [40])
    args = {
        "q": q, "k": np.zeros((3, 16, 1, 64), "f4"), "v": np.zeros((3, 16, 1, 64), "f4"),
        "cu_seqlens_q": starts([8]), "max_seqlen_q": 8, "max_seqlen_k": 40,
        "seqused_k": np.array([40], np.int32), "block_table": np.array([[2, 0, 1]], np.int32),
        "softmax_scale": None, "softcap": 0.0, "window_size": (15, 0), "causal": True,
    }  # fmt: skip
    token = np.arange(40)
    slot = (args["block_table"][0, token // 16], token % 16)
    args["k"][slot], args["v"][slot] = k, v
    output = empty_output(args)
    cascade(args, output)
    np.testing.assert_allclose(output[:, 0, 0], 24.5 + np.arange(8), rtol=1e-6)


def test_a_request_may_end_with_the_prefix():
    args = shared_case(lengths=((1, 31), (1, 40)))
    assert args["seqused_k"][0] == PREFIX
    check_cascade(args)


def test_a_query_in_front_of_the_end_of_the_prefix_is_refused():
    args = shared_case(lengths=((1, 60), (4, 30)))
    output = empty_output(args)
    with pytest.raises(ValueError, match=r"4 queries of request 1 .* last 1 keys; .* at most 31"):
        cascade(args, output)
    assert np.isnan(output.astype(np.float32)).all()
    cascade(args, output, alibi_slopes=np.zeros(4, np.float32))
    expect_attention(**args).check(output)


def test_schedules_of_both_passes_are_taken_and_checked():
    args = shared_case()
    geometry = {"num_heads_q": 4, "num_heads_kv": 2, "headdim": 64, "qkv_dtype": "bfloat16"}
    rows = args["q"].shape[0]
    prefix = cupyflash.get_scheduler_metadata(
        1, rows, PREFIX, cache_seqlens=np.array([PREFIX], np.int32), page_size=PAGE, **geometry
    )
    suffix = cupyflash.get_scheduler_metadata(
        4, args["max_seqlen_q"], args["max_seqlen_k"] - PREFIX,
        cache_seqlens=args["seqused_k"] - np.int32(PREFIX), page_size=PAGE, causal=True, **geometry,
    )  # fmt: skip
    check_cascade(args, prefix_scheduler_metadata=prefix, suffix_scheduler_metadata=suffix)
    output = empty_output(args)
    for wrong in ({"prefix_scheduler_metadata": suffix}, {"suffix_scheduler_metadata": prefix}):
        with pytest.raises(ValueError, match="scheduler_metadata was made for"):
            cascade(args, output, **wrong)
    with pytest.raises(ValueError, match="scheduler_metadata was made for num_splits=0"):
        cascade(args, output, prefix_scheduler_metadata=prefix, max_num_splits=4)
    with pytest.raises(ValueError, match="no prefix to share; drop both"):
        cascade(args, output, sliding_window=(5, 0), prefix_scheduler_metadata=prefix)
    assert np.isnan(output.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"common_prefix_len": 0}, ValueError, "positive multiple of the block size 16; .* is 16"),
        ({"common_prefix_len": 40}, ValueError, "common_prefix_len=40 .* the nearest is 32"),
        ({"max_kv_len": 31}, ValueError, "max_kv_len=31 must hold the prefix, at least 32"),
        ({"max_num_splits": -1}, ValueError, "num_splits=-1"),
        ({"sliding_window": (-2, 0)}, ValueError, "window_size"),
        ({"sliding_window": 5}, ValueError, "window_size=5 must be two integers"),
        ({"logits_soft_cap": -1.0}, ValueError, "softcap=-1.0"),
        ({"fa_version": 3}, ValueError, "fa_version=3"),
        ({"cu_query_lens": None}, TypeError, "cu_seqlens_q"),
        ({"prefix_kv_lens": np.array([16], np.int32)}, ValueError, r"=\[16\]; .* must be \[32\]"),
        ({"cu_prefix_query_lens": np.array([0, 1], np.int32)}, ValueError, r"=\[0, 1\]; .* \[0, "),
    ],
)
def test_bad_cascades_are_refused(change, error, words):
    args = shared_case()
    output = empty_output(args)
    with pytest.raises(error, match=words):
        cascade(args, output, **change)
    assert np.isnan(output.astype(np.float32)).all()


def test_one_pass_gives_the_same_answer_as_two():
    args = shared_case(sink=True)
    two, one = empty_output(args), empty_output(args)
    cascade(args, two)
    cascade(args, one, sliding_window=(10**6, -1))
    rows = int(args["cu_seqlens_q"][-1])
    expect_attention(**args).check(one)
    np.testing.assert_allclose(
        one[:rows].astype(np.float32), two[:rows].astype(np.float32), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("changes", [{"sink": True, "softcap": 5.0}, {"window_size": (15, 0)}])
def test_cascade_on_every_path(path, changes):
    args = shared_case(lengths=((1, 40), (4, 40), (2, 31)), **changes)
    given = {n: path.array(a) if isinstance(a, np.ndarray) else a for n, a in args.items()}
    rows = int(args["cu_seqlens_q"][-1])
    output = path.array(empty_output(args))
    cascade(
        given, output, cu_prefix_query_lens=path.array(starts([rows])),
        prefix_kv_lens=path.array(np.array([PREFIX], np.int32)),
    )  # fmt: skip
    expect_attention(**args).check(path.host(output))
    assert np.isnan(path.host(output)[rows:].astype(np.float32)).all()
