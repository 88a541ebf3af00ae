"""``batch_invariant=True`` on the emulated Hopper kernels: bits of a request are its own."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from test_emul_decode_sm90 import PLAIN, names

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.spans import LARGEST_SCAN
from cupyflash.runtime.workspace import COUNTERS
from cupyflash.scheduler_metadata import get_scheduler_metadata

OPTIONS = {"fa_version": 3, "batch_invariant": True}
LONG = PLAIN.replace(
    lengths=((1, 700), (1, -1), (1, 0), (1, 15), (2, 256), (1, 255), (1, 3100), (40, 100), (4, 41)),
)
CASES = {
    "plain": LONG,
    "window": LONG.replace(window_size=(300, 0)),
    "narrow": LONG.replace(head_dim=64, group_size=3, sink=True),
    "wide": LONG.replace(head_dim=192, head_dim_v=128, group_size=2, softcap=20.0),
    "decoding alone": LONG.replace(lengths=tuple((1, n) for _, n in LONG.lengths)),
}


def alone(inputs, request):
    """One request of a batch."""
    args, at = inputs.args, inputs.args["cu_seqlens_q"][request : request + 2]
    taken = slice(request, request + 1)
    return {
        **args,
        "q": args["q"][at[0] : at[1]],
        "cu_seqlens_q": np.array([0, at[1] - at[0]], np.int32),
        "seqused_k": args["seqused_k"][taken],
        "block_table": args["block_table"][taken],
        "max_seqlen_q": max(int(at[1] - at[0]), 1),
    }


@pytest.mark.parametrize("name", CASES)
def test_a_request_alone_has_the_bits_it_has_in_company(name):
    case = CASES[name]
    with emulated("sm_90", num_sms=7):
        inputs = case.make()
        inputs.check(flash_attn_varlen_func, **OPTIONS)
        assert any("attention_decode" in name for name in names())
        out, lse = inputs.call(flash_attn_varlen_func, **OPTIONS)
        starts = inputs.args["cu_seqlens_q"]
    with emulated("sm_90", num_sms=20):
        for request in range(len(case.lengths)):
            rows = slice(starts[request], starts[request + 1])
            found = flash_attn_varlen_func(
                **alone(inputs, request), return_softmax_lse=True, **OPTIONS
            )
            assert found[0].tobytes() == out[rows].tobytes()
            assert found[1].tobytes() == lse[:, rows].tobytes()


def test_bits_do_not_depend_on_bounds():
    with emulated("sm_90", num_sms=5):
        inputs = CASES["decoding alone"].make()
        first = inputs.call(flash_attn_varlen_func, **OPTIONS)
        for splits, most_q, most_k in ((1, 1, 8192), (7, 4, 4096), (0, 30, 4096), (0, 1, 1 << 17)):
            inputs.args.update(max_seqlen_q=most_q, max_seqlen_k=most_k)
            again = inputs.call(flash_attn_varlen_func, **OPTIONS, num_splits=splits)
            assert [a.tobytes() for a in again] == [a.tobytes() for a in first]


def test_more_counters_than_a_stream_has():
    heads = 8
    batch = max(LARGEST_SCAN, COUNTERS // heads) + 1
    lengths = [(1, 400), *[(1, -1)] * (batch - 3), (1, 300), (1, 16)]
    case = PLAIN.replace(lengths=tuple(lengths), num_heads_kv=heads, group_size=1, head_dim=64)
    with emulated("sm_90"):
        inputs = case.make()
        inputs.check(flash_attn_varlen_func, **OPTIONS)
        made = get_scheduler_metadata(
            batch, 1, inputs.args["max_seqlen_k"], heads, heads, 64, inputs.args["seqused_k"],
            "bfloat16", cu_seqlens_q=inputs.args["cu_seqlens_q"], page_size=16, causal=True,
        )  # fmt: skip
        inputs.check(flash_attn_varlen_func, scheduler_metadata=made, **OPTIONS)
        assert "schedule" in names()


def test_a_small_workspace_is_refused():
    """Fewer pieces would be other bits."""
    with emulated("sm_90"):
        inputs = LONG.make()
        with pytest.raises(ValueError, match="batch_invariant=True needs"):
            inputs.call(flash_attn_varlen_func, workspace=np.zeros(4096, np.uint8), **OPTIONS)
