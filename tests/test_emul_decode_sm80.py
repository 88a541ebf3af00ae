"""The portable decode kernel on the emulator: spans of a batch, and how their pieces are merged."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from repeats import bits
from test_emul_attention import attend
from test_emul_decode_sm90 import PLAIN, decode_cases

from cupyflash.runtime.device import active_device
from cupyflash.testing import Case

SPLITS = st.sampled_from([0, 0, 1, 2, 5])


def kernels():
    return [report.symbol.split("_sm80")[0] for report in active_device().reports]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@settings(max_examples=50)
@given(
    case=decode_cases(), order=st.integers(0, 9), num_splits=SPLITS,
    num_sms=st.sampled_from([2, 1, 9]),
)  # fmt: skip
def test_any_case_in_any_order_of_warps(arch, case, order, num_splits, num_sms):
    """Head sizes past 128 are another kernel's."""
    case = case.replace(
        head_dim=min(case.head_dim, 128), head_dim_v=min(case.head_dim_v or 128, 128)
    )
    with emulated(arch, num_sms=num_sms, seed=order):
        case.make().check(attend, num_splits=num_splits)
        assert kernels() == ["attention_decode"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_weights_of_exact_scores_are_added_up_in_float32(arch):
    """All products are 0: what the log-sum-exp is off by is of sums and of a logarithm."""
    case = Case(lengths=((1, 11), (0, 0), (1, -1)), head_dim=128, head_dim_v=64, page_size=64,
                softmax_scale=0.05, alibi="request", sink=True, q_type="fp16", kv_type="fp16",
                layout="HND", pattern="one_hot", seed=2231)  # fmt: skip
    with emulated(arch, num_sms=2):
        case.make().check(attend)


@pytest.mark.parametrize("types", [("fp16", "fp16"), ("bf16", "e4m3")])
@pytest.mark.parametrize("page_size", [None, 1, 16, 20, 128])
def test_pieces_of_every_kind(types, page_size):
    """Spans that begin inside of a segment, have whole ones, and end inside of another."""
    case = PLAIN.replace(q_type=types[0], kv_type=types[1], page_size=page_size, sink=True,
                         lengths=((1, 900), (2, -2), (3, 60), (1, 130), (4, 700)))  # fmt: skip
    for num_sms in (1, 3):
        with emulated("sm_80", num_sms=num_sms, seed=num_sms):
            case.make().check(attend)


@pytest.mark.parametrize("window", [(20, 0), (100, 5), (7, -1)])
def test_a_window_reads_its_key_tiles_alone(window):
    """Pages that no query sees hold indices that must not be followed."""
    inputs = PLAIN.replace(lengths=((1, 700), (2, 300)), window_size=window, causal=False).make()
    table = inputs.args["block_table"]
    table[0, : (700 - window[0]) // 16] = table[1, : (300 - window[0]) // 16] = 2**31 - 1
    with emulated("sm_80"):
        inputs.check(attend)


def test_many_pieces_of_one_segment():
    """The last blocks to arrive take a row each."""
    case = PLAIN.replace(lengths=((1, 9000),), num_heads_kv=1, group_size=2, head_dim=64)
    for splits in (0, 3):
        with emulated("sm_80", num_sms=36, seed=3) as device:
            device.run = partial(device.run, resident=72)  # all of them: they wait for each other
            case.make().check(attend, num_splits=splits)


def test_large_batches():
    """Of more requests than a block adds up: by the table of schedule.cu."""
    contexts = np.random.default_rng(0).integers(-1, 40, 600).tolist()
    case = PLAIN.replace(lengths=tuple((1, c) for c in contexts), num_heads_kv=1, group_size=2,
                         head_dim=64)  # fmt: skip
    with emulated("sm_80"):
        case.make().check(attend)
        assert kernels() == ["schedule", "attention_decode"]


@pytest.mark.parametrize("nbytes", [0, 16, 5000, 20_000, 1 << 20])
def test_a_workspace_of_any_size_and_content(nbytes):
    inputs, workspace = PLAIN.make(), device_array(nbytes, np.uint8)
    with emulated("sm_80"):
        for _ in range(2):
            workspace[...] = 0xFF
            inputs.check(attend, workspace=workspace)


@pytest.mark.parametrize("longest", [1, 30])
@pytest.mark.parametrize("nbytes", [0, 16, 1024, 2432])
def test_a_workspace_too_small_for_the_table_of_a_large_batch(nbytes, longest):
    """Requests are then found by ``cu_seqlens_q``: nothing is written past its end."""
    lengths = (*((1, 5),) * 599, (longest, 3))
    case = PLAIN.replace(lengths=lengths, num_heads_kv=1, group_size=2, head_dim=64)
    with emulated("sm_80"):
        case.make().check(attend, workspace=device_array(nbytes, np.uint8))
        spans = ["schedule", "attention_decode"] if nbytes == 2432 else []
        assert kernels() == spans + ["attention_fwd"] * (not spans or longest > 1)


def test_same_bits_whatever_the_order():
    inputs, found = PLAIN.make(), set()
    for seed in range(5):
        with emulated("sm_80", seed=seed):
            found.add(b"".join(bits(inputs.call(attend))))
    assert len(found) == 1
