"""Batches of decode steps and prefills on the emulated Hopper kernels: two launches, one result."""

from __future__ import annotations

from emulator import emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.device import active_device
from cupyflash.testing import Case

MIXED = Case(
    lengths=((1, 300), (40, 70), (1, -1), (3, 17), (0, 0), (4, 200), (5, 100), (2, -3), (130, 0)),
    num_heads_kv=2, group_size=4, head_dim=64, q_type="bf16", kv_type="bf16", page_size=16,
    causal=True,
)  # fmt: skip


def kernels():
    return [r.symbol.split("_sm90")[0] for r in active_device().reports]


def test_each_launch_takes_its_requests():
    with emulated("sm_90", num_sms=4):
        MIXED.make().check(flash_attn_varlen_func, fa_version=3)
        assert [k for k in kernels() if k != "attention_combine"] == [
            "attention_decode",
            "attention_fwd",
        ]


def test_a_batch_of_equal_prefills_is_one_launch():
    with emulated("sm_90", num_sms=4):
        case = MIXED.replace(lengths=((40, 70), (40, 0)))
        case.make().check(flash_attn_varlen_func, fa_version=3)
        assert "attention_decode" not in kernels()


@settings(max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 1, 2, 4, 5, 17, 33]), st.sampled_from([-2, 0, 1, 40, 150])
        ),
        min_size=2, max_size=6,
    ).map(tuple),
    group=st.sampled_from([1, 3, 4, 8, 16]),
    page_size=st.sampled_from([16, None, 64]),
    options=st.sampled_from([
        {}, {"window_size": (40, 0)}, {"softcap": 20.0}, {"sink": True}, {"num_splits": 3},
    ]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_mixture(lengths, group, page_size, options, seed):
    call = {"num_splits": options["num_splits"]} if "num_splits" in options else {}
    fields = {k: v for k, v in options.items() if k != "num_splits"}
    case = MIXED.replace(
        lengths=lengths, group_size=group, num_heads_kv=1, page_size=page_size, **fields
    )
    with emulated("sm_90", num_sms=6, seed=seed):
        case.make().check(flash_attn_varlen_func, fa_version=3, **call)
