"""Warm calls: what is kept between them, what must not be, and how little they do."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from stand_in import Array, StandIn, decode, forget, sent

from cupyflash import flash_attn_varlen_func, merge_attn_states, reshape_and_cache_flash
from cupyflash.runtime import attention_launch, call, workspace
from cupyflash.runtime.device import use_device
from cupyflash.runtime.merge_plan import MERGE_PARAMS
from cupyflash.runtime.spans import LARGEST_SCAN
from cupyflash.runtime.write_plan import WRITE_PARAMS

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def device(monkeypatch):
    forget()
    monkeypatch.setattr(workspace, "on_stream", lambda *_: nullcontext())
    with use_device(StandIn()) as found:
        yield found


def test_equal_calls_are_validated_once(device, monkeypatch):
    flash_attn_varlen_func(**decode())
    monkeypatch.setattr(call, "describe", None)
    monkeypatch.setattr(attention_launch, "make_attention_plans", None)
    flash_attn_varlen_func(**decode(ptr=1 << 24))
    assert sent(device)["q"] == 1 << 24
    assert sent(device)["block_table"] == (1 << 24) + 48
    assert sent(device)["out"] == 7 << 20


def test_another_array_at_the_same_address_is_seen_as_it_is(device):
    flash_attn_varlen_func(**decode())
    first = sent(device)
    strides = (2 * 8 * 64 * 2, 128, 2)
    flash_attn_varlen_func(**decode(q=Array((2, 8, 64), np.float16, strides=strides)))
    assert sent(device)["q"] == first["q"]
    assert sent(device)["q_token_stride"] == 2 * first["q_token_stride"]
    flash_attn_varlen_func(**decode(batch=3))
    assert (first["batch"], sent(device)["batch"]) == (2, 3)
    flash_attn_varlen_func(**decode(q=Array((2, 6, 64), np.float16)))
    assert (sent(device)["heads_q"], sent(device)["group"]) == (6, 3)


def test_alignment_is_that_of_each_call(device):
    for ptr, wide in ((1 << 20, 1), ((1 << 20) + 2, 0), (1 << 21, 1)):
        flash_attn_varlen_func(**decode(q=Array((2, 8, 64), np.float16, ptr)))
        assert (sent(device)["q_vectorised"], sent(device)["k_vectorised"]) == (wide, 1)


def test_scales_are_those_of_each_call(device):
    bytes_ = {n: Array((9, 16, 2, 64), np.uint8) for n in "kv"}
    whole = Array((2, 2), np.float32, 5 << 20)
    one = Array((1,), np.float32, 6 << 20)
    for v_descale, expected in (
        (0.5, (0, 0, 0.5)), (whole, (5 << 20, 8, 1.0)), (one, (6 << 20, 0, 1.0)),
        (2.0, (0, 0, 2.0)), (None, (0, 0, 1.0)),
    ):  # fmt: skip
        for _ in range(2):
            flash_attn_varlen_func(**decode(**bytes_, v_descale=v_descale))
            found = sent(device)
            assert tuple(found[n] for n in ("v_descale", "v_descale_batch_stride", "v_scale")) == (
                expected
            )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_seqlen_q": 1.0}, "max_seqlen_q is float"),
        ({"max_seqlen_q": True}, "max_seqlen_q is bool"),
        ({"causal": 0}, "causal is int"),
        ({"softcap": False}, "softcap is bool"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf"),
        ({"window_size": (-1.0, -1)}, "two integers"),
        ({"window_size": 3}, "two integers"),
        ({"num_splits": True}, "num_splits is bool"),
        ({"fp8_dtype": ["e4m3"]}, "fp8_dtype is list"),
        ({"seqused_k": [3, 4]}, "seqused_k is list"),
        ({"k": Array((9, 16, 2, 64), np.float16, ordinal=1)}, "several GPUs"),
        ({"k": Array((9, 16, 2, 64), np.float32)}, "k, v|float32"),
    ],
)
def test_a_like_call_that_was_accepted_lets_no_wrong_one_pass(device, change, error):
    flash_attn_varlen_func(**decode(window_size=(-1, -1)))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=error):
            flash_attn_varlen_func(**decode(**{"window_size": (-1, -1), **change}))
    assert len(device.launches) == 1


def test_more_layouts_than_are_kept(device, monkeypatch):
    monkeypatch.setattr(call, "_MOST_LAYOUTS", 5)
    for batch in (*range(1, 9), *range(1, 9)):
        flash_attn_varlen_func(**decode(batch=batch))
        assert sent(device)["batch"] == batch
    assert len(call._layouts) <= 7


def test_threads_with_layouts_of_their_own(device):
    wrong = []

    def work(batch):
        own = StandIn()
        with use_device(own):
            for i in range(200):
                flash_attn_varlen_func(**decode(batch=batch, ptr=(batch << 24) + 64 * i))
                found = sent(own)
                if (found["batch"], found["q"]) != (batch, (batch << 24) + 64 * i):
                    wrong.append(batch)

    threads = [threading.Thread(target=work, args=(1 + i % 3,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def write(ptr=1 << 20, k_scale=1.0, v_scale=1.0, kind="fp8", cache=np.uint8):
    return (
        *(Array((5, 2, 64), np.float16, ptr + 512 * i) for i in range(2)),
        *(Array((4, 16, 2, 64), cache, ptr + 4096 * i) for i in (1, 2)),
        Array((5,), np.int64, ptr + 8), kind, k_scale, v_scale,
    )  # fmt: skip


def test_writes_are_validated_once_and_use_the_scales_of_each(device, monkeypatch):
    scale = Array((1,), np.float32, 3 << 20)
    kinds = ((0.5, scale), (0.5, 0.5), (None, 0.25), (0.5, 0.25))
    for k_scale, v_scale in kinds:
        reshape_and_cache_flash(*write(k_scale=k_scale, v_scale=v_scale))
    monkeypatch.setattr("cupyflash.kv_cache.check_write", None)
    for k_scale, v_scale in kinds:
        reshape_and_cache_flash(*write(1 << 24, k_scale, v_scale))
        found = sent(device, WRITE_PARAMS)
        assert found["key_source"] == 1 << 24
        assert found["key_scale_value"] == (1.0 if k_scale is None else k_scale)
        assert found["value_scale"] == (3 << 20 if v_scale is scale else 0)
        assert found["value_scale_value"] == (1.0 if v_scale is scale else v_scale)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), True, "1"])
def test_a_wrong_scale_is_refused_after_right_ones(device, scale):
    reshape_and_cache_flash(*write())
    with pytest.raises((TypeError, ValueError), match="k_scale"):
        reshape_and_cache_flash(*write(k_scale=scale))
    assert len(device.launches) == 1


def states(ptr=1 << 20, kind=np.float16):
    out, lse = (5, 2, 64), (2, 5)
    return [
        Array(out, kind, ptr), Array(out, np.float16, ptr + (1 << 14)),
        Array(lse, np.float32, ptr + (1 << 15)), Array(out, np.float16, ptr + (1 << 16)),
        Array(lse, np.float32, ptr + (1 << 17)),
    ]  # fmt: skip


def test_merges_are_validated_once(device, monkeypatch):
    scaled = {"output_scale": 0.5}
    merge_attn_states(*states())
    merge_attn_states(*states(kind=np.uint8), **scaled)
    monkeypatch.setattr("cupyflash.merge.check_merge", None)
    for context, expected in ((None, 5), (0, 0), (3, 3), (9, 5)):
        merge_attn_states(*states(1 << 24), prefill_tokens_with_context=context)
        found = sent(device, MERGE_PARAMS)
        assert (found["out"], found["prefix_tokens"]) == (1 << 24, expected)
    merge_attn_states(*states(kind=np.uint8), **scaled)
    assert sent(device, MERGE_PARAMS)["out_scale_value"] == 0.5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prefill_tokens_with_context": -1}, "prefill_tokens_with_context=-1"),
        ({"prefill_tokens_with_context": True}, "prefill_tokens_with_context is bool"),
        ({"output_scale": 0.5}, "output_scale"),
        ({"prefix_output": Array((5, 2, 64), np.float16, (1 << 20) + 64)}, "output overlaps"),
        ({"prefix_lse": Array((5, 2), np.float32)}, "prefix_lse"),
    ],
)
def test_a_wrong_merge_is_refused_after_right_ones(device, change, error):
    names = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
    right = dict(zip(names, states(), strict=True))
    merge_attn_states(**right)
    with pytest.raises((TypeError, ValueError), match=error):
        merge_attn_states(**{**right, **change})
    assert len(device.launches) == 1


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (
            lambda **changes: reshape_and_cache_flash(*write(**changes)),
            ({"ptr": 1 << 25}, {"k_scale": 0.5}, {"v_scale": Array((1,), np.float32, 3 << 20)}),
        ),
        (lambda **changes: merge_attn_states(*states(**changes)), ({"ptr": 1 << 25},)),
        (
            lambda context=None: merge_attn_states(
                *states(), prefill_tokens_with_context=context, stream=3
            ),
            ({"context": 2},),
        ),
    ],
)
def test_a_write_or_merge_with_equal_addresses_is_queued_again(device, first, others):
    for again in range(3):
        first()
        assert device.again == again

    def queued(launch):
        kernel, plan, args, stream = launch
        return kernel, plan, args.values, stream

    kept = queued(device.launches[-1])
    assert kept == queued(device.launches[0])
    for change in others:
        first(**change)
        assert device.again == 2
        assert queued(device.launches[-1]) != kept
    first()
    assert queued(device.launches[-1]) == kept
    device.status = 201
    launches = len(device.launches)
    first()
    assert [*map(queued, device.launches[launches:])] == [kept]
    with use_device(StandIn()) as other:
        first()
        assert not other.again


def calls_of(function):
    """Functions of the library that a call enters: a host time that no busy machine changes."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call" and "cupyflash" in frame.f_code.co_filename

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("batch", [1, 4096])
def test_a_warm_call_enters_few_functions(device, batch):
    def attention(arguments, like):
        for _ in range(3):
            flash_attn_varlen_func(**arguments)
        return calls_of(lambda: flash_attn_varlen_func(**like))

    out = Array((batch, 8, 64), np.float16, 1 << 28)
    fresh, given = decode(batch=batch), decode(batch=batch, out=out)
    table = batch > LARGEST_SCAN  # of another launch, in memory of the stream
    assert attention(fresh, fresh) <= (14 if table else 12)
    assert attention(given, given) <= (13 if table else 11)
    moved = {**given, "q": Array((batch, 8, 64), np.float16, 5 << 20)}
    assert attention(given, moved) <= (57 if table else 45)
    arguments = write()
    reshape_and_cache_flash(*arguments)
    reshape_and_cache_flash(*arguments)
    assert calls_of(lambda: reshape_and_cache_flash(*arguments)) <= 14
    merged = states()
    for _ in range(2):
        merge_attn_states(*merged)
    assert calls_of(lambda: merge_attn_states(*merged)) <= 18
