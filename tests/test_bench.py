"""The benchmark's case list: floors against figures worked by hand, and shared pages."""

import numpy as np
import pytest

from cupyflash.bench import H200, bench_cases, floor_seconds
from cupyflash.bench.flashinfer import cascade_levels
from cupyflash.bench.inputs import _block_table

FLOORS_US = {
    "prefill/d64/full/s512": 88.1,
    "prefill/d128/causal/s16384": 1409.7,
    "prefill-fp8/d256/causal/s2048": 98.4,
    "window-prefill/w1024/s16384": 341.4,
    "ragged-prefill/32req": 511.4,
    "decode/gqa32-8/b64/s8192": 473.2,
    "decode/fp8kv/gqa32-8/b64/s8192": 236.7,
    "decode/ragged/b128": 937.2,
    "decode/spec4/b64/s4096": 237.4,
    "mixed/64dec+2pre": 179.9,
    "shared-prefix/b64/p8192+s256": 22.4,
    "shared-prefix/b256/p4096+s512": 122.9,
    "mla/h128/b64/s4096": 93.6,
}


def _case(name):
    (found,) = [case for case in bench_cases(name) if case.name == name]
    return found


@pytest.mark.parametrize(("name", "microseconds"), FLOORS_US.items())
def test_floor(name, microseconds):
    assert round(floor_seconds(H200, _case(name)) * 1e6, 1) == microseconds


def test_names_are_unique():
    names = [case.name for case in bench_cases()]
    assert len(names) == len(set(names)) == 100


def test_filter_takes_parts():
    assert {c.name.split("/")[0] for c in bench_cases("merge,write")} == {"merge", "write"}


SHARED = [case for case in bench_cases("shared-prefix") if case.prefix_levels]


@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.name)
def test_shared_pages_are_shared_and_no_others(case):
    table, used = _block_table(case, case.page_size, np.random.default_rng(0))
    columns = -(-np.asarray(case.k_lens) // case.page_size)
    pages = np.concatenate([row[:n] for row, n in zip(table, columns, strict=True)])
    assert set(pages) == set(range(used))
    assert used * case.page_size == case.distinct_k
    tokens, sharers = case.prefix_levels[0]
    first = table[:, : tokens // case.page_size].reshape(-1, sharers, tokens // case.page_size)
    assert (first == first[:, :1]).all()


@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.name)
def test_levels_for_flashinfer_hold_every_key_once_a_request(case):
    table, _ = _block_table(case, case.page_size, np.random.default_rng(0))
    pages = [[] for _ in case.q_lens]
    for queries, rows, lengths in cascade_levels(case, table):
        assert sum(queries) == case.total_q
        sharers = len(pages) // len(rows)
        for i, row in enumerate(rows):
            for request in pages[i * sharers : (i + 1) * sharers]:
                request += list(row[: -(-lengths[i] // case.page_size)])
    for request, row, length in zip(pages, table, case.k_lens, strict=True):
        assert request == list(row[: -(-length // case.page_size)])


def test_groups_of_levels():
    groups = _case("shared-prefix/b128/p2048+p1024+s256").prefix_groups
    assert groups[0] == (range(128), 2048)
    assert groups[1:3] == [(range(16), 3072), (range(16, 32), 3072)]
    assert len(groups) == 9


def test_three_levels_count_each_group_once():
    case = _case("shared-prefix/b128/p2048+p1024+s256")
    assert case.distinct_k == 2048 + 8 * 1024 + 128 * 256
