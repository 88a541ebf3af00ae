"""Shared prefixes in 8-bit caches on the emulator: widened between their copy and the product."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import emulated
from hypothesis import given
from hypothesis import strategies as st
from prefixes import SHARED, cascade, fp8_cases, make_shared, once, schedule_of, through
from test_cascade import check_cascade, shared_case

from cupyflash import AttentionBounds
from cupyflash.runtime.compile import compile_source, kernel_source
from cupyflash.runtime.shared_plan import shared_plans
from cupyflash.runtime.shared_tile import shared_fp8_variants
from cupyflash.testing import expect_attention

KERNEL = "attention_shared_sm90_fp16_e"
FP8 = SHARED.replace(kv_type="e4m3", descale=True)
ALL, LEVELS = [([0, 1, 2, 3], 64)], [([0, 1, 2, 3], 64), ([0, 2], 128), ([2, 0], 160)]


def check(case, groups, device, **more):
    inputs, tree = make_shared(case, groups)
    inputs.check(once(tree, **more))
    assert through(KERNEL, device), [r.symbol for r in device.reports]


@given(
    drawn=fp8_cases(), order=st.integers(0, 9), num_sms=st.sampled_from([3, 1, 2, 5]),
    most=st.sampled_from([0, 0, 2, 5]),
)  # fmt: skip
def test_any_tree_is_attention(drawn, order, num_sms, most):
    """Descales of requests that share keys differ: they belong to rows."""
    with emulated("sm_90", num_sms=num_sms, seed=order) as device:
        check(*drawn, device, num_splits=most)


@pytest.mark.parametrize("kv_type", ["e4m3", "e5m2"])
@pytest.mark.parametrize("q_type", ["bf16", "fp16", "e4m3", "e5m2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_types_of_queries_and_caches(q_type, kv_type, head_dim):
    case = FP8.replace(q_type=q_type, kv_type=kv_type, head_dim=head_dim)
    with emulated("sm_90", num_sms=2, seed=1) as device:
        check(case, LEVELS, device)


@given(drawn=fp8_cases(), num_sms=st.sampled_from([3, 1, 5, 16]))
def test_any_tree_with_a_schedule_made_ahead(drawn, num_sms):
    case, groups = drawn
    case = case.replace(causal=True, window_size=(case.window_size[0], 0), descale=False)
    case = case.replace(q_type="bf16")
    with emulated("sm_90", num_sms=num_sms, seed=1) as device:
        inputs, tree = make_shared(case, groups)
        cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))
        assert through(KERNEL, device)


@pytest.mark.parametrize("pattern", ["spiky", "outlier", "one_hot", "constant"])
@pytest.mark.parametrize("q_type", ["bf16", "e5m2"])
def test_patterns(pattern, q_type):
    case = FP8.replace(pattern=pattern, q_type=q_type, lengths=((1, 420), (2, 300), (1, 330)))
    with emulated("sm_90", num_sms=2, seed=1) as device:
        check(case, [([0, 1, 2], 256)], device)


@pytest.mark.parametrize("size", [2.0**60, 2.0**-60, 0.0])
def test_queries_outside_of_fp16(size):
    """bf16 rows are divided by a power of two each; so are those of other sizes beside them."""
    inputs, tree = make_shared(FP8.replace(pattern="constant", descale=False), ALL)
    inputs.args["q"][1::2] *= np.float32(size)
    inputs.args["softmax_scale"] = 2.0**-60
    with emulated("sm_90", num_sms=2) as device:
        inputs.check(once(tree))
        assert through(KERNEL, device)


@pytest.mark.parametrize("changes", [{}, {"softcap": 5.0}, {"alibi": "request"}, {"sink": True}])
def test_descales_of_any_sign_and_size(changes):
    inputs, tree = make_shared(FP8.replace(**changes), LEVELS)
    inputs.args["k_descale"][...] = np.array([[-1.5, 2], [0, 1], [1e-3, -4], [0.25, 0.5]])
    inputs.args["v_descale"][...] = np.array([[-1.5, 2], [0, 1], [1e3, -4], [0.25, 1e-3]])
    with emulated("sm_90", num_sms=2, seed=1) as device:
        inputs.check(once(tree))
        assert through(KERNEL, device)


def test_same_bits_whatever_the_order():
    inputs, tree = make_shared(FP8, LEVELS)
    found = set()
    for seed in range(6):
        with emulated("sm_90", seed=seed):
            found.add(inputs.call(once(tree))[0].tobytes())
    assert len(found) == 1


def test_every_byte_of_a_shared_cache():
    """All values of the format but NaN, which is a NaN in every row that sees it."""
    inputs, tree = make_shared(FP8.replace(lengths=((1, 200),) * 4, descale=False), ALL)
    shared = inputs.args["block_table"][0, :4]
    every = np.resize([n for n in range(256) if n & 0x7F != 0x7F], (4, 16, 2, 128))
    for name in ("k", "v"):
        inputs.args[name].view(np.uint8)[shared] = every
    inputs.args["softmax_scale"] = 1e-3
    with emulated("sm_90", num_sms=2):
        inputs.check(once(tree))
        inputs.args["v"].view(np.uint8)[shared[2], 5, 1, 7] = 0x7F
        found = inputs.call(once(tree))[0].astype(np.float32)
    assert np.isnan(found[:4, 4:, 7]).all()
    assert not np.isnan(found[:4, :4]).any()


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"sink": True, "softcap": 5.0}, {"window_size": (40, 3)}, {"alibi": "request"}]
)
def test_a_prefix_of_all(changes, common):
    """Descales of each request, or of all: one launch either way."""
    args = shared_case(**changes, kv_type="e4m3", descale=not common)
    if common:
        args.update(k_descale=0.5, v_descale=np.array([2.0], np.float32))
    with emulated("sm_90", num_sms=2, seed=1) as device:
        check_cascade(args)
        assert [r.symbol.split("_sm90")[0] for r in device.reports] == ["attention_shared"]


def test_a_schedule_for_a_16_bit_cache_is_refused():
    """Tiles of own keys differ."""
    inputs, tree = make_shared(FP8.replace(descale=False), LEVELS)
    other, _ = make_shared(SHARED, LEVELS)
    with emulated("sm_90"), pytest.raises(ValueError, match="made for other calls"):
        cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(other, tree))


def compiles_cleanly(variant):
    source, options = kernel_source(variant)
    _, log = compile_source(source, (*options, "--ptxas-options=-v"), variant)
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log
    assert "warning" not in log, log


@pytest.mark.parametrize("end", ["e4m3_d128_r8", "e5m2_d64_r16_alibi", "e5m2_d64_r8_parts"])
def test_variants_compile_without_spills(end):
    variants = [v for v in shared_fp8_variants() if v.symbol.endswith(end)]
    assert len(variants) == 1
    compiles_cleanly(*variants)


@pytest.mark.deep
def test_all_variants_compile_without_spills():
    for variant in shared_fp8_variants():
        compiles_cleanly(variant)


def test_a_warm_up_prepares_what_a_capture_needs():
    bounds = AttentionBounds(
        batch_size=4, max_seqlen_q=1, max_seqlen_k=201, num_heads_q=8, num_heads_kv=2, headdim=128,
        dtype="bfloat16", kv_dtype="e4m3", page_size=16, causal=True, prefix_levels=2,
    )  # fmt: skip
    with emulated("sm_90", num_sms=2) as device:
        names = {plan.variant.symbol for plan in shared_plans(bounds.problem(), device.info, 2)}
    assert {f"attention_shared_sm90_fp16_e4m3_d128_r8{end}" for end in ("", "_ahead")} <= names


def test_an_output_of_an_8_bit_query_in_fp16():
    inputs, tree = make_shared(FP8.replace(q_type="e4m3"), LEVELS)
    with emulated("sm_90", num_sms=2) as device:
        cascade_out = np.zeros(inputs.placed["out"].view.shape, np.float16)
        once(tree)(**inputs.args, out=cascade_out, lse=None)
        assert through(KERNEL, device)
    expect_attention(**inputs.args).check(cascade_out)
