"""The Hopper decode kernel on the emulator, through the public function."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.device import active_device
from cupyflash.scheduler_metadata import get_scheduler_metadata
from cupyflash.testing import Case
from cupyflash.testing.strategies import cases

PAGES = (16, None, 1, 4, 8, 20, 48, 64)
BORDERS = sorted({0, 1} | {n + d for n in (16, 32, 64, 128, 256, 512) for d in (-1, 0, 1)})
CONTEXTS = st.one_of(st.integers(0, 20), st.sampled_from(BORDERS), st.integers(-3, -1))


def lengths(most_q, most_requests=6):
    q_len = st.one_of(st.just(1), st.integers(0, most_q))
    pair = st.one_of(st.tuples(q_len, CONTEXTS), st.just((1, -1)), st.just((0, 0)))
    return st.lists(pair, min_size=1, max_size=most_requests).map(tuple)


@st.composite
def decode_cases(draw):
    """Cases that the kernel takes: few rows a request, rows of keys at multiples of 16 bytes."""
    head_dim = draw(st.sampled_from([128, 64, 8, 80, 96, 192, 256]))
    head_dim_v = draw(st.sampled_from([None, None, 64, 128, 256]))
    most_rows = 8 if max(head_dim, head_dim_v or 0) > 128 else 16
    group = draw(st.sampled_from([g for g in (4, 1, 2, 3, 5, 7, 8, 16) if g <= most_rows]))
    case = draw(
        cases(
            lengths=lengths(most_rows // group),
            num_heads_kv=st.sampled_from([1, 2, 3, 4]),
            group_size=group,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            page_size=st.sampled_from(PAGES),
            layout=st.sampled_from(["NHD", "HND", "strided"]),
        )
    )
    q_type, kv_type = case.q_type, case.kv_type
    if q_type == "fp32":
        q_type = kv_type = draw(st.sampled_from(["fp16", "bf16"]))
    if "e" in kv_type and head_dim % 16:
        head_dim = 16
    return case.replace(q_type=q_type, kv_type=kv_type, head_dim=head_dim)


def names():
    return [report.symbol for report in active_device().reports]


def runs_decode():
    return any("attention_decode_sm90" in name for name in names())


def check(case, **options):
    inputs = case.make()
    inputs.check(flash_attn_varlen_func, fa_version=3, **options)
    if sum(case.q_lens) and sum(case.kv_lens):
        assert runs_decode(), names()


@given(
    case=decode_cases(), order=st.integers(0, 9), num_splits=st.sampled_from([0, 0, 1, 2, 5]),
    num_sms=st.sampled_from([4, 1, 20]), invariant=st.sampled_from([False, False, True]),
)  # fmt: skip
def test_any_case_in_any_order_of_warps(case, order, num_splits, num_sms, invariant):
    options = {"num_splits": num_splits, "batch_invariant": invariant}
    with emulated("sm_90", num_sms=num_sms, seed=order):
        if invariant:
            case.make().check(flash_attn_varlen_func, fa_version=3, **options)
        else:
            check(case, **options)


PLAIN = Case(
    lengths=((1, 700), (1, -1), (1, 0), (1, 15), (1, 16), (1, 300)), num_heads_kv=2, group_size=4,
    head_dim=128, page_size=16, q_type="bf16", kv_type="bf16", causal=True,
)  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 17, 24, 32, 128, None])
@pytest.mark.parametrize("types", [("bf16", "bf16"), ("bf16", "e4m3"), ("e5m2", "e5m2")])
def test_every_page_size(page_size, types):
    with emulated("sm_90"):
        check(PLAIN.replace(page_size=page_size, q_type=types[0], kv_type=types[1]))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("head_dim_v", [None, 64, 128, 256])
def test_every_head_size(head_dim, head_dim_v):
    with emulated("sm_90"):
        check(PLAIN.replace(head_dim=head_dim, head_dim_v=head_dim_v, group_size=2))


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(group):
    with emulated("sm_90"):
        check(PLAIN.replace(group_size=group, kv_type="bf16"))


@pytest.mark.parametrize("count", [64, 140])
def test_zeros_among_many(count):
    """As padded requests of a captured graph."""
    lengths = [(1, 30), *[(1, -1)] * 20, (1, 511), *[(1, -1)] * (count - 23), (1, 16)]
    with emulated("sm_90"):
        check(PLAIN.replace(lengths=tuple(lengths), num_heads_kv=1))


@pytest.mark.parametrize("window", [(20, 0), (0, 0), (100, 5), (-1, 3), (7, -1)])
def test_a_window_reads_its_key_tiles_alone(window):
    """Pages that no query sees hold indices that must not be followed."""
    case = PLAIN.replace(lengths=((1, 700), (2, 300)), window_size=window, causal=False)
    inputs = case.make()
    table, left = inputs.args["block_table"], window[0]
    if left >= 0:
        for row, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
            table[row, : max(0, kv_len - q_len - left) // 16] = 2**31 - 1
    with emulated("sm_90") as device:
        inputs.check(flash_attn_varlen_func, fa_version=3)
        windowed = device.reports[-1].mma_count
        check(case.replace(window_size=(-1, -1)))
        assert (windowed < device.reports[-1].mma_count / 2) == (0 <= left < 300)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 1), st.integers(-2, 400)), min_size=4, max_size=5),
    shape=st.sampled_from([("bf16", 128, 1), ("fp16", 128, 4), ("bf16", 128, 8), ("fp16", 128, 3),
                           ("e4m3", 128, 2), ("e5m2", 128, 1), ("bf16", 64, 2), ("fp16", 64, 1)]),
    num_heads_kv=st.sampled_from([8, 8, 16]),
    page_size=st.sampled_from([16, 32, 128]), layout=st.sampled_from(["NHD", "HND", "strided"]),
    order=st.integers(0, 9), num_sms=st.sampled_from([2, 3, 4]),
)  # fmt: skip
def test_heads_side_by_side(lengths, shape, num_heads_kv, order, num_sms, **options):
    """Warps of a block share what comes for all of their heads."""
    kv_type, head_dim, group = shape
    q_type = "bf16" if kv_type.startswith("e") else kv_type
    case = Case(lengths=tuple(lengths), num_heads_kv=num_heads_kv, group_size=group,
                head_dim=head_dim, q_type=q_type, kv_type=kv_type, **options)  # fmt: skip
    with emulated("sm_90", num_sms=num_sms, seed=order):
        check(case)
        if sum(case.q_lens) and sum(case.kv_lens):
            assert any(name.endswith("_shared") for name in names()), names()


def test_same_bits_whatever_the_order():
    inputs = PLAIN.make()
    found = set()
    for seed in range(6):
        with emulated("sm_90", seed=seed):
            out, lse = inputs.call(flash_attn_varlen_func, fa_version=3)
            found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


def test_versions_agree_within_their_bounds():
    inputs = PLAIN.make()
    with emulated("sm_90"):
        results = [inputs.call(flash_attn_varlen_func, fa_version=v) for v in (2, 3)]
    for result in results:
        inputs.expected().check(*result)


@pytest.mark.parametrize("nbytes", [0, 16, 5000, 20_000, 1 << 20])
def test_a_workspace_of_any_size_and_content(nbytes):
    from emulator import device_array

    inputs, workspace = PLAIN.make(), device_array(nbytes, np.uint8)
    with emulated("sm_90"):
        for _ in range(3):
            workspace[...] = 0xFF
            inputs.check(flash_attn_varlen_func, fa_version=3, workspace=workspace)


def test_many_pieces_of_one_segment():
    """More partial rows than one warp of the last block merges."""
    case = PLAIN.replace(lengths=((1, 5000),), num_heads_kv=1, group_size=8)
    for splits in (0, 3):
        with emulated("sm_90", num_sms=12, seed=3):
            check(case, num_splits=splits)


@pytest.mark.parametrize("with_table", [False, True])
def test_large_batches(with_table):
    rng = np.random.default_rng(0)
    contexts = rng.integers(-1, 40, 600).tolist()
    case = PLAIN.replace(lengths=tuple((1, c) for c in contexts), num_heads_kv=1, group_size=2,
                         head_dim=64)  # fmt: skip
    inputs = case.make()
    with emulated("sm_90"):
        metadata = None
        if with_table:
            metadata = get_scheduler_metadata(
                600, inputs.args["max_seqlen_q"], inputs.args["max_seqlen_k"], 2, 1, 64,
                inputs.args["seqused_k"], "bfloat16", page_size=16, causal=True,
            )  # fmt: skip
        inputs.check(flash_attn_varlen_func, fa_version=3, scheduler_metadata=metadata)
        assert names().count("schedule") == 1


def test_bounds_that_are_too_large_change_nothing():
    """As in a captured graph: lengths far below the bounds."""
    inputs = PLAIN.make()
    with emulated("sm_90"):
        first = inputs.call(flash_attn_varlen_func, fa_version=3)
        inputs.args.update(max_seqlen_k=1 << 20)
        second = inputs.call(flash_attn_varlen_func, fa_version=3)
        assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


def test_what_the_kernel_does_not_take_is_served_all_the_same():
    refused = {
        "rows": PLAIN.replace(lengths=((40, 100),)),
        "odd addresses": PLAIN.replace(layout="odd"),
    }
    for case in refused.values():
        with emulated("sm_90"):
            case.make().check(flash_attn_varlen_func, fa_version=3)
            assert not runs_decode()


SPECIAL = {
    "packed": {"page_size": None}, "page": {"page_size": 48}, "small page": {"page_size": 8},
    "window": {"window_size": (20, 0)}, "soft cap": {"softcap": 20.0}, "ALiBi": {"alibi": "head"},
    "sink": {"sink": True}, "head size": {"head_dim": 120}, "head size of v": {"head_dim_v": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "right window", "8-bit cache", *SPECIAL])
def test_plain_calls_have_kernels_of_their_own(name):
    plain = PLAIN.replace(head_dim=128, page_size=16)
    more = {"right window": {"window_size": (-1, 3)}, "8-bit cache": {"kv_type": "e4m3"}}
    with emulated("sm_90"):
        check(plain.replace(**{**SPECIAL, **more}.get(name, {})))
        assert names()[0].endswith("_plain") == (name not in SPECIAL)


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}]
)
def test_calls_that_are_cut_otherwise_are_not_plain(options):
    with emulated("sm_90"):
        check(PLAIN.replace(head_dim=128, page_size=16), **options)
        assert not names()[0].endswith("_plain")


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
def test_scale_of_any_sign(scale):
    with emulated("sm_90"):
        check(PLAIN.replace(softmax_scale=scale))


def test_large_queries_over_an_8_bit_cache():
    """bf16 queries past the range of fp16, in which the products are computed."""
    inputs = PLAIN.replace(kv_type="e4m3", softmax_scale=1e-6).make()
    q = inputs.args["q"]
    q[...] = (q.astype(np.float32) * 1e5).astype(q.dtype)
    with emulated("sm_90"):
        inputs.check(flash_attn_varlen_func, fa_version=3)


def test_a_nan_query_is_a_nan_row():
    inputs = PLAIN.make()
    with emulated("sm_90"):
        right = inputs.call(flash_attn_varlen_func, fa_version=3)[0].astype(np.float32)
        inputs.args["q"][0, 1] = np.nan
        found = inputs.call(flash_attn_varlen_func, fa_version=3)[0].astype(np.float32)
    assert np.isnan(found[0, 1]).all()
    found[0, 1] = right[0, 1]
    rows = sum(PLAIN.q_lens)
    assert np.array_equal(found[:rows], right[:rows])
