"""Calls on a GPU that are queued as an earlier one was: with what their arrays hold now."""

from __future__ import annotations

import threading

import pytest
from stand_in import forget
from test_gpu_replay import REPLAYED, need

from cupyflash import kept_launches
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.workspace import free_workspaces

pytestmark = pytest.mark.gpu


def placed(cupy, name):
    version, case = REPLAYED[name]
    need(version)
    inputs = case.make(cupy)
    out, lse = (inputs.placed[key].view for key in ("out", "lse"))
    arguments = {**inputs.args, "out": out, "lse": lse, "fa_version": version}
    rows = sum(case.q_lens)

    def bits():
        return out[:rows].view(cupy.uint16).copy(), lse[:, :rows].view(cupy.uint32).copy()

    def right():
        """The bits of a call that nothing is known of."""
        forget()
        flash_attn_varlen_func(**arguments)
        return bits()

    return arguments, bits, right


def equal(found, expected):
    return all(bool((a == b).all()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", REPLAYED)
def test_what_arrays_hold_now_is_what_counts(again, name):
    """Lengths, a query and pages change in place; scratch memory moves."""
    import cupy

    arguments, bits, right = placed(cupy, name)
    used, q, table = (arguments[key] for key in ("seqused_k", "q", "block_table"))
    kept = used.copy(), table.copy()

    def shorten():
        used[...] = cupy.maximum(used - 1, 0)

    def turn():
        same = q.view(f"u{q.itemsize}")
        same[...] = same[:, ::-1].copy()

    def swap():
        table[0, :2] = table[0, 1::-1].copy()

    def restore():
        used[...], table[...] = kept

    for change in (lambda: None, shorten, turn, swap, free_workspaces, restore):
        change()
        expected = right()
        flash_attn_varlen_func(**arguments)
        first = len(again)
        for _ in range(3):
            arguments["out"].view(cupy.uint16).fill(0xFFFF)
            flash_attn_varlen_func(**arguments)
            assert equal(bits(), expected)
        assert len(again) == first + 3


@pytest.mark.parametrize("name", ["portable decode", "Hopper decode", "Hopper mixed"])
def test_known_calls_on_streams_of_several_threads(again, name):
    import cupy

    wrong = []

    def work():
        arguments, bits, _ = placed(cupy, name)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            flash_attn_varlen_func(**arguments)
            expected = bits()
            for _ in range(200):
                flash_attn_varlen_func(**arguments)
                if not equal(bits(), expected):
                    wrong.append(name)
            stream.synchronize()

    need(REPLAYED[name][0])
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(again) >= 4 * 150
    assert len(kept_launches._recordings) >= 4


def test_a_known_call_that_makes_its_results(again):
    import cupy

    arguments, _, right = placed(cupy, "portable decode")
    expected, rows = right(), right()[0].shape[0]
    del arguments["out"], arguments["lse"]

    def attend():
        out, lse = flash_attn_varlen_func(**arguments, return_softmax_lse=True)
        return out, lse, (out[:rows].view(cupy.uint16), lse[:, :rows].view(cupy.uint32))

    several = [attend() for _ in range(8)]
    assert len({array.data.ptr for found in several for array in found[:2]}) == 16
    assert all(equal(found[2], expected) for found in several)
    del several
    times = len(again)
    for _ in range(20):  # of which the pool gives most the same memory
        assert equal(attend()[2], expected)
    assert len(again) >= times + 10
