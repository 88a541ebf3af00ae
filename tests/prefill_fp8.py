"""Random cases of the 8-bit Hopper prefill."""

from __future__ import annotations

from hypothesis import strategies as st

from cupyflash.testing.strategies import cases

BORDERS = sorted({n + d for n in (16, 64, 128, 256) for d in (-1, 0, 1)})
CONTEXTS = st.one_of(st.integers(0, 20), st.sampled_from(BORDERS), st.integers(-5, -1))


def lengths(most_requests):
    """At least one request of more rows than the decode kernel takes."""
    q_len = st.one_of(st.sampled_from([1, 0, 63, 64, 65, 127, 128, 129]), st.integers(2, 70))
    some = st.lists(st.tuples(q_len, CONTEXTS), max_size=most_requests - 1)
    many = st.tuples(st.sampled_from([33, 64, 127, 128, 129, 130]), CONTEXTS)
    return st.tuples(some, many).map(lambda drawn: (*drawn[0], drawn[1]))


@st.composite
def fp8_cases(draw, most_requests=3, **fixed):
    """Cases that the kernel takes: q, k and v in e4m3, pages from 16, rows at multiples of 16."""
    case = draw(
        cases(
            lengths=lengths(most_requests),
            num_heads_kv=st.sampled_from([1, 2]),
            group_size=st.sampled_from([1, 2, 3, 4, 8]),
            head_dim=st.sampled_from([64, 128, 16, 80, 96]),
            head_dim_v=st.sampled_from([None, None, 64, 128]),
            page_size=st.sampled_from([None, 16, 24, 32, 48, 64, 256]),
            layout=st.sampled_from(["NHD", "HND"]),
            **fixed,
        )
    )
    return case.replace(q_type="e4m3", kv_type="e4m3")
