"""The model of sums of 8-bit products, against log-sum-exps that an H200 returned."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.testing import Case
from cupyflash.testing.tensor_core import eight_bit_products

_LENGTHS = ((5, 60), (1, 200), (33, 90))
_E4M3 = {"lengths": _LENGTHS, "q_type": "e4m3", "kv_type": "e4m3"}

# A case, (request, row, head) and the log-sum-exp there.
RECORDED = [
    (Case(num_heads_kv=2, group_size=3, descale=True, layout="HND", pattern="spiky", seed=121,
          **_E4M3), (2, 12, 4), 149.652588),
    (Case(num_heads_kv=2, group_size=4, page_size=48, causal=True, window_size=(40, 0), sink=True,
          layout="HND", seed=122, **_E4M3), (2, 12, 1), 5.96177959),
    (Case(num_heads_kv=2, page_size=16, softcap=20.0, alibi="head", descale=True, layout="strided",
          pattern="spiky", seed=123, **_E4M3), (2, 27, 0), 9.18533802),
    (Case(num_heads_kv=2, group_size=3, head_dim=80, causal=True, layout="strided", seed=124,
          **_E4M3), (2, 1, 5), 5.38608503),
    (Case(num_heads_kv=2, group_size=4, head_dim=80, page_size=48, window_size=(40, 0), sink=True,
          descale=True, layout="strided", pattern="spiky", seed=125, **_E4M3), (2, 3, 0), 145.737),
]  # fmt: skip


@pytest.mark.parametrize(("case", "where", "recorded"), RECORDED)
def test_errors_are_those_of_the_gpu(case, where, recorded):
    request, row, head = where
    expected = case.make().expected(p_dtype="e4m3")
    at = sum(case.q_lens[:request]) + row
    error = recorded - expected.lse[head, at]
    model = expected.lse_baseline[head, at] - expected.lse[head, at]
    assert abs(model - error) < 0.01 * abs(error) + 1e-6


def test_sums_that_fit_are_exact():
    rng = np.random.default_rng(0)
    q, k = rng.integers(-8, 9, (2, 5, 96)) / 4.0
    np.testing.assert_array_equal(eight_bit_products(q, k), q @ k.T)


def test_what_is_below_13_bits_of_the_largest_is_lost_towards_zero():
    q = np.zeros((1, 32))
    k = np.zeros((1, 32))
    q[0, :3] = k[0, 0] = 1
    k[0, 1], k[0, 2] = 2.0**-13, -(2.0**-14)
    assert eight_bit_products(q, k)[0, 0] == 1 + 2.0**-13
