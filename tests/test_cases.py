"""Cases: equal bits from equal cases, poison around them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from cupyflash.testing import LAYOUTS, Case, place
from cupyflash.testing.strategies import cases


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 4, 3, 8), (0, 2, 8)])
def test_place_keeps_values_and_sees_a_write_outside(layout, shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed = place(values, layout)
    np.testing.assert_array_equal(placed.view, values)
    assert placed.view.strides[-1] == 4
    placed.view[...] = -1
    placed.assert_padding_intact()
    placed.buffer[-1] = 5
    with pytest.raises(AssertionError, match="outside of the array"):
        placed.assert_padding_intact()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts_differ_in_memory(layout):
    values = np.zeros((3, 2, 8), np.float32)
    assert place(values, layout).view.strides != place(values).view.strides


@given(cases())
def test_equal_cases_give_equal_bits(case):
    first, second = case.make(), case.make()
    for name in "qkv":
        assert first.args[name].tobytes() == second.args[name].tobytes()


@given(cases())
def test_what_must_not_be_read_is_poison(case):
    inputs = case.make()
    kv_lens = case.kv_lens
    if case.page_size is None:
        tail = inputs.args["k"][sum(kv_lens) :]
    else:
        owned = np.zeros(inputs.args["k"].shape[:2], bool)
        table = inputs.args["block_table"]
        for request, length in enumerate(kv_lens):
            token = np.arange(length)
            page = table[request, token // case.page_size]
            owned[page, token % case.page_size] = True
            assert (table[request, -(-length // case.page_size) :] == 2**31 - 1).all()
        tail = inputs.args["k"][~owned]
    if tail.dtype == np.uint8:
        assert (tail == 0x7F).all()
    else:
        assert np.isnan(tail.astype(np.float32)).all()


def test_a_write_to_a_row_of_no_request_is_seen():
    inputs = Case(lengths=((2, 3),)).make()

    def writes_everywhere(**args):
        args["out"][...] = 0
        return args["out"], args["lse"]

    with pytest.raises(AssertionError, match=r"rows past cu_seqlens_q\[-1\]=2 were written"):
        inputs.call(writes_everywhere)
