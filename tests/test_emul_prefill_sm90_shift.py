"""The fixed shift of the Hopper prefill: built inputs that outgrow it, on the emulator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator import emulated

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.testing import Case
from cupyflash.testing.requests import to_numpy


def built(pattern, kind, heads=1, xp=np, head_dim=64):
    """Scores that take a certain course over the keys; tiles are walked from the last key down."""
    inputs = Case(lengths=((130, 600),), num_heads_kv=heads, head_dim=head_dim, causal=True,
                  q_type=kind, kv_type=kind).make(xp)  # fmt: skip
    args = inputs.args
    q, k, v = (to_numpy(args[name]).astype(np.float32) for name in "qkv")
    used, dtype = slice(0, 730), args["q"].dtype
    if pattern == "jump":  # one early key is far above the range of float32 from all later ones
        q[:130], k[used] = 1, k[used] * 0.1
        k[5] = 30
    elif pattern == "climb":  # every tile is above the one before it
        q[:130], k[used] = 1, (0.02 * np.arange(730)[::-1])[:, None, None]
    elif pattern == "edge":  # sums between 2^127 and 2^128, where a factor of 2^-127 would be 0
        q[:130], k[used] = 1, 0
        k[3] = 88.4 / head_dim**0.5
    elif pattern == "wild":  # far apart within every tile
        k[used] *= 60
    else:  # values at the end of their type
        q[:130], k[used] = 1, k[used] * 0.1
        k[5] = 3
        v[used] = np.sign(v[used] + 1e-9) * float(ml_dtypes.finfo(dtype).max) * 0.99
    for name, values in zip("qkv", (q, k, v), strict=True):
        args[name][...] = xp.asarray(values.astype(dtype))
    return inputs


def run(inputs, seed=0, num_sms=2):
    with emulated("sm_90a", num_sms=num_sms, seed=seed) as device:
        inputs.check(flash_attn_varlen_func, num_splits=1)
        return device.reports[-1].mma_count


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("pattern", ["jump", "climb", "edge", "wild", "values"])
def test_built_scores(pattern, kind):
    run(built(pattern, kind))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_jump_runs_tiles_again_and_a_climb_does_not(kind):
    once = run(built("climb", kind))
    assert run(built("jump", kind)) == 2 * once


@pytest.mark.parametrize("num_sms", [1, 2, 3])
def test_a_list_of_tiles_to_run_again(num_sms):
    run(built("jump", "bf16", heads=4), num_sms=num_sms)


def test_a_row_does_not_depend_on_rows_beside_it():
    """One row's sums outgrow its shift; the bits of all others stay."""
    calm, other = built("values", "bf16"), built("values", "bf16")
    for inputs in (calm, other):
        inputs.args["v"][...] = np.arange(64).astype(inputs.args["v"].dtype)
        inputs.args["k"][5] = 30
        inputs.args["q"][...] = 0.01
    other.args["q"][77] = 0.25  # 60 nats, within one tile: no tile runs again
    with emulated("sm_90a", num_sms=2):
        left, right = (x.call(flash_attn_varlen_func, num_splits=1) for x in (calm, other))
    rows = np.arange(130) != 77
    assert left[0][:130][rows].tobytes() == right[0][:130][rows].tobytes()
    assert left[1][:, :130][:, rows].tobytes() == right[1][:, :130][:, rows].tobytes()


def test_nan_in_a_query_stays_in_its_row():
    inputs = built("climb", "bf16")
    clean = inputs.expected()
    inputs.args["q"][7] = np.nan
    with emulated("sm_90a", num_sms=2):
        out, lse = inputs.call(flash_attn_varlen_func, num_splits=1)
    assert np.isnan(out[7].astype(np.float32)).all()
    assert np.isnan(lse[0, 7])
    out[7], lse[:, 7] = clean.out[7], clean.lse[:, 7]
    clean.check(out, lse)


@pytest.mark.parametrize("seed", range(4))
def test_the_end_of_the_tiles_is_read_before_the_end_of_those_that_run_again(seed):
    """Four tiles run again: the message after them takes the place of the one before them."""
    case = Case(lengths=((1, 0), (1, 0), (17, 255)), num_heads_kv=2, group_size=8, q_type="bf16",
                kv_type="bf16", head_dim=64, head_dim_v=128, pattern="spiky",
                seed=2556)  # fmt: skip
    run(case.make(), seed)
