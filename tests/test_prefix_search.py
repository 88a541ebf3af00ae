"""Requests whose block tables begin alike: on the host, and by the kernel."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from emulator import device_array, emulated
from hypothesis import given
from hypothesis import strategies as st
from prefixes import check_nodes, sets_of

from cupyflash import find_prefix_tree
from cupyflash.prefix_search import shared_groups
from cupyflash.prefix_tree import prefix_tree


def test_groups_are_found_in_a_table():
    table = np.full((6, 8), 99, np.int32)
    table[[0, 2, 3, 5], :2] = [7, 8]
    table[[2, 5], 2:5] = [1, 2, 3]
    table[[0, 3], 2] = [4, 5]
    table[[1, 4], 0] = [20, 21]
    computed = np.array([60, 30, 90, 60, 30, 85])
    found = shared_groups(table, computed, 16)
    assert found == [([0, 2, 3, 5], 32), ([2, 5], 80)]
    assert shared_groups(table, computed, 16, levels=1) == found[:1]
    assert shared_groups(table, computed, 16, null_block=7) == []
    assert shared_groups(table, np.array([60, 30, 15, 60, 30, 85]), 16)[0] == ([0, 3, 5], 32)
    assert shared_groups(table[:0], computed[:0], 16) == []


@given(seed=st.integers(0, 999), requests=st.integers(0, 12), levels=st.integers(1, 3))
def test_found_groups_make_a_tree_and_are_shared(seed, requests, levels):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 3, (requests, 6)).astype(np.int32)
    computed = rng.integers(0, 97, requests)
    groups = shared_groups(table, computed, 16, levels=levels)
    tree = prefix_tree(groups, requests)
    assert tree.levels <= levels
    for members, tokens in groups:
        rows = table[members, : tokens // 16]
        assert tokens
        assert len(members) > 1
        assert (rows == rows[0]).all()
        assert (computed[members] >= tokens).all()


def test_groups_of_a_table_on_a_gpu_are_not_read():
    with pytest.raises(TypeError, match="NumPy"):
        shared_groups([[1, 2]], [16], 16)


def test_a_gpu_without_clusters_is_refused_before_a_launch():
    with emulated("sm_80") as device:
        table, lengths = device_array((2, 3), np.int32, 0), device_array(2, np.int32, 40)
        with pytest.raises(NotImplementedError, match=r"9\.0; this one is 8\.0: pass NumPy arrays"):
            find_prefix_tree(table, lengths, 16)
        assert "find_prefixes.cu" not in {variant.source for variant in device.kernels}


@st.composite
def tables(draw):
    """Rows that begin alike, the queries and lengths of their requests, and poison behind."""
    requests, blocks = draw(st.integers(1, 12)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    table = rng.integers(-1, draw(st.integers(1, 4)), (requests, blocks)).astype(np.int32)
    queries = rng.integers(0, 4, requests) if draw(st.booleans()) else np.ones(requests, int)
    lengths = np.minimum(rng.integers(0, 16 * blocks + 1, requests) + queries, 16 * blocks)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // 16) :] = 2**31 - 1
    return table, queries, lengths.astype(np.int32)


def tree_of(table, queries, lengths, **options):
    starts = np.cumsum([0, *queries]).astype(np.int32)
    return find_prefix_tree(table, lengths, 16, starts, **options)


@given(
    drawn=tables(), levels=st.integers(1, 3), null=st.sampled_from([None, 0, 1]),
    num_sms=st.sampled_from([1, 3, 20]), seed=st.integers(0, 9),
)  # fmt: skip
def test_the_kernel_finds_what_the_host_finds(drawn, levels, null, num_sms, seed):
    expected = tree_of(*drawn, levels=levels, null_block=null)
    with emulated("sm_90", num_sms=num_sms, seed=seed):
        for _ in range(2):
            found = tree_of(*drawn, levels=levels, null_block=null)
    assert sorted(found.order) == sorted(expected.order)
    assert sets_of(found) == sets_of(expected)
    check_nodes(found)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 64, 700])
def test_the_kernel_on_a_gpu(requests):
    import cupy

    rng = np.random.default_rng(requests)
    table = rng.integers(0, 2, (requests, 40)).astype(np.int32)
    table[::2, :20] = 7
    lengths = rng.integers(1, 640, requests).astype(np.int32)
    expected = find_prefix_tree(table, lengths, 16)
    found = find_prefix_tree(cupy.asarray(table), cupy.asarray(lengths), 16)
    host = type(found)(found.batch, found.levels, found.buffer.get())
    assert sets_of(host) == sets_of(expected)
    check_nodes(host)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"levels": 4}, ValueError, "levels=4 from 1 to 3"),
        ({"block_size": 0}, ValueError, "block_size=0"),
        ({"seqused_k": np.zeros(3, np.int32)}, ValueError, "seqused_k"),
        ({"block_table": np.zeros((2, 4))}, TypeError, "block_table is float64"),
        ({"out": np.zeros(3, np.int32)}, ValueError, "this tree takes int32"),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_bad_tables_are_refused(change, error, words, on_gpu):
    args = {
        "block_table": device_array((2, 4), np.int32, 0), "block_size": 16,
        "seqused_k": device_array(2, np.int32, 30),
    } | change  # fmt: skip
    place = emulated("sm_90") if on_gpu else nullcontext()
    with place, pytest.raises(error, match=words):
        find_prefix_tree(**args)
