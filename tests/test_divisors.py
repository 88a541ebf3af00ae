"""Quotients by products: exact, or not offered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cupyflash.runtime.divisors import exact_inverse, inverse, log2, page_shift


@given(divisor=st.integers(0, 1 << 16), end=st.integers(1, 1 << 40), draw=st.randoms())
def test_an_inverse_that_is_offered_is_exact(divisor, end, draw):
    found = exact_inverse(divisor, end)
    if not found:
        return
    whole = (end - 1) // divisor * divisor
    numbers = [0, end - 1, whole, max(0, whole - 1), *(draw.randrange(end) for _ in range(20))]
    assert all(n * found >> 32 == n // divisor for n in numbers)


def test_it_is_offered_for_what_models_have():
    for group in (2, 3, 8, 16, 128):
        assert exact_inverse(group, (1 << 18) * group)
    assert exact_inverse(4, 32 * 4)
    assert exact_inverse(0, 1) == exact_inverse(1, 1 << 20) == exact_inverse(1 << 15, 1) == 0


def test_other_forms():
    assert inverse(1) == 0
    assert inverse(3) == 1431655766
    assert [log2(1), log2(64)] == [0, 6]
    assert [page_shift(size) for size in (None, 1, 16, 24)] == [0, 0, 4, -1]
