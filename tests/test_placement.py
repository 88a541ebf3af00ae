"""Where arrays lie: elements at multiples of their size, results in memory of their own."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.batched import flash_attn_func
from cupyflash.testing import Case

SMALL = Case(
    lengths=((1, 40), (3, 17), (2, 0)), num_heads_kv=2, group_size=2, page_size=16, q_type="fp16",
    kv_type="fp16",
)  # fmt: skip
LONG = SMALL.replace(lengths=((70, 900),), num_heads_kv=1)
SHAPES = {"decode": SMALL, "packed": SMALL.replace(page_size=None), "prefill": LONG}
CALLED = pytest.mark.parametrize("name", SHAPES)


def call(inputs, **changes):
    return flash_attn_varlen_func(**{**inputs.args, **changes})


@CALLED
@pytest.mark.parametrize("num_splits", [1, 4])
def test_out_may_be_q_itself(path, name, num_splits):
    inputs = SHAPES[name].make(path.xp)
    right = path.host(call(inputs, num_splits=num_splits))
    rows = sum(inputs.case.q_lens)
    q = inputs.args["q"]
    found = call(inputs, out=q, num_splits=num_splits)
    assert found is q
    assert path.host(q)[:rows].tobytes() == right[:rows].tobytes()


def _shifted(xp, inputs):
    q = inputs.args["q"]
    both = xp.zeros((q.shape[0] + 1, *q.shape[1:]), q.dtype)
    both[:-1] = q
    return {"q": both[:-1], "out": both[1:]}


def _in_keys(xp, inputs):
    q, flat = inputs.args["q"], xp.zeros(1 << 20, xp.float16)
    k = flat[: inputs.args["k"].size].reshape(inputs.args["k"].shape)
    return {"k": k, "v": k, "out": flat[: q.size].reshape(q.shape)}


def _lse_in_out(xp, inputs):
    rows, heads, _ = shape = inputs.args["q"].shape
    flat = xp.zeros(int(np.prod(shape)), xp.float16)
    lse = flat.view(xp.float32)[: heads * rows].reshape(heads, rows)
    return {"out": flat.reshape(shape), "lse": lse}


def _lse_in_lengths(xp, inputs):
    rows, heads, _ = inputs.args["q"].shape
    flat = xp.zeros(heads * rows + 8, xp.float32)
    starts = flat[: len(inputs.args["cu_seqlens_q"])].view(xp.int32)
    starts[...] = inputs.args["cu_seqlens_q"]
    return {"cu_seqlens_q": starts, "lse": flat[: heads * rows].reshape(heads, rows)}


OVERLAPS = {
    "out overlaps q": _shifted,
    "out overlaps k": _in_keys,
    "out overlaps lse": _lse_in_out,
    "lse overlaps cu_seqlens_q": _lse_in_lengths,
}


@CALLED
@pytest.mark.parametrize("words", OVERLAPS)
def test_results_that_would_change_what_is_read_are_refused(path, name, words):
    inputs = SHAPES[name].make(path.xp)
    changes = OVERLAPS[words](path.xp, inputs)
    before = {key: path.host(array).tobytes() for key, array in changes.items()}
    with pytest.raises(ValueError, match=f"{words}: results need memory of their own"):
        call(inputs, **changes)
    assert {key: path.host(array).tobytes() for key, array in changes.items()} == before


def test_the_lse_of_a_batch_is_apart_from_its_results(path):
    q = path.array(np.ones((2, 3, 2, 64)), np.float16)
    flat = path.xp.zeros(q.size, np.float16)
    lse = flat.view(np.float32)[:12].reshape(2, 2, 3)
    with pytest.raises(ValueError, match="lse overlaps out: results need memory of their own"):
        flash_attn_func(q, q, q, out=flat.reshape(q.shape), lse=lse)
    assert not path.host(flat).any()
    flash_attn_func(q, q, q, out=path.xp.zeros_like(q), lse=lse)
    assert path.host(lse).all()


def test_results_between_the_rows_of_queries_are_apart_from_them(path):
    inputs = SMALL.make(path.xp)
    right = path.host(call(inputs))
    q = inputs.args["q"]
    both = path.xp.zeros((q.shape[0], 2, *q.shape[1:]), q.dtype)
    both[:, 0] = q
    rows = sum(SMALL.q_lens)
    call(inputs, q=both[:, 0], out=both[:, 1])
    assert path.host(both)[:rows, 1].tobytes() == right[:rows].tobytes()
    assert path.host(both)[:, 0].tobytes() == path.host(q).tobytes()


ODD = {"q": 1, "k": 1, "v": 1, "out": 1, "cu_seqlens_q": 2, "seqused_k": 2, "block_table": 2}


@pytest.mark.parametrize("name", ODD)
def test_elements_at_odd_addresses_are_refused_where_kernels_read_them(path, name):
    inputs = SMALL.make(path.xp)
    array = inputs.args["q"] if name == "out" else inputs.args[name]
    memory = path.xp.zeros(array.nbytes + 16, path.xp.uint8)
    moved = memory[ODD[name] :][: array.nbytes].view(array.dtype).reshape(array.shape)
    if path.name != "gpu":  # which CuPy's own kernels could not
        moved[...] = array
    if path.name == "numpy":
        right = call(inputs)
        found = call(inputs, **{name: moved})
        rows = sum(SMALL.q_lens)
        assert found[:rows].tobytes() == right[:rows].tobytes()
        return
    with pytest.raises(ValueError, match=f"{name} starts {ODD[name]} bytes past a multiple of"):
        call(inputs, **{name: moved})


def test_odd_strides_are_refused_where_kernels_read_them(path):
    inputs = SMALL.make(path.xp)
    q = inputs.args["q"]
    memory = path.xp.zeros(q.shape[0] * (q[0].nbytes + 1), path.xp.uint8)
    rows = path.xp.lib.stride_tricks.as_strided(
        memory[: q.nbytes].view(q.dtype).reshape(q.shape),
        strides=(q[0].nbytes + 1, *q.strides[1:]),
    )
    if path.name == "numpy":
        rows[...] = q
        assert call(inputs, q=rows)[0].tobytes() == call(inputs)[0].tobytes()
        return
    with pytest.raises(ValueError, match=r"its strides are \(513, 128, 2\)"):
        call(inputs, q=rows)


def test_a_workspace_of_no_bytes_is_one(path):
    inputs = SMALL.make(path.xp)
    empty = None if path.name == "numpy" else path.xp.zeros(0, np.uint8)
    inputs.check(flash_attn_varlen_func, workspace=empty)
