"""Chunked-local attention as causal attention of virtual requests."""

from __future__ import annotations

import numpy as np
import pytest
from batches import starts
from hypothesis import given
from hypothesis import strategies as st
from step_cases import Case, cases
from steps import Made

from cupyflash.backends import ChunkedLocalAttentionBuilder
from cupyflash.backends.local_attention import make_local_attention_virtual_batches
from cupyflash.testing import expect_attention


def virtual(chunk, page, q_lens, kv_lens):
    return make_local_attention_virtual_batches(
        chunk, starts(q_lens), np.array(kv_lens, np.int32), page
    )


@pytest.mark.parametrize(
    ("chunk", "page", "q_lens", "kv_lens", "queries", "keys", "owner", "first_block"),
    [
        (  # the case that vLLM documents
            *(4, 2, [4, 10, 5], [6, 17, 9], [2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1]),
            *([0, 0, 1, 1, 1, 1, 2, 2], [0, 2, 2, 4, 6, 8, 2, 4]),
        ),
        (4, 2, [1], [1], [1], [1], [0], [0]),
        (4, 4, [1], [4], [1], [4], [0], [0]),  # the last token of a chunk
        (4, 4, [1], [5], [1], [1], [0], [1]),  # the first of the next
        (4, 1, [8], [8], [4, 4], [4, 4], [0, 0], [0, 4]),
        (4, 4, [3], [100], [3], [4], [0], [24]),
        (6, 2, [5, 0, 1], [9, 4, 13], [2, 3, 1], [6, 3, 1], [0, 0, 2], [0, 3, 6]),
        (1024, 16, [300, 1], [1100, 7], [224, 76, 1], [1024, 76, 7], [0, 0, 1], [0, 64, 0]),
        (4, 2, [0, 0], [7, 0], [], [], [], []),
    ],
)
def test_requests_are_cut_at_chunks(
    chunk, page, q_lens, kv_lens, queries, keys, owner, first_block
):
    cut = virtual(chunk, page, q_lens, kv_lens)
    assert np.diff(cut.query_start_loc).tolist() == queries
    assert cut.seq_lens.tolist() == keys
    assert cut.request.tolist() == owner
    assert cut.first_block.tolist() == first_block
    assert {a.dtype for a in (cut.query_start_loc, cut.seq_lens, cut.request)} == {
        np.dtype(np.int32)
    }


def test_a_virtual_requests_blocks_are_its_chunks():
    cut = virtual(4, 2, [4, 10, 5], [6, 17, 9])
    table = np.arange(100, 127, dtype=np.int32).reshape(3, 9)
    found = cut.block_table(table)
    assert found.dtype == np.int32
    pairs = [(100, 101), (102, 103), (111, 112), (113, 114), (115, 116), (117, 117), (120, 121),
             (122, 123)]  # fmt: skip
    assert found.tolist() == [list(pair) for pair in pairs]  # 117: the table ends there


@pytest.mark.parametrize(
    ("chunk", "q_lens", "kv_lens", "match"),
    [
        (6, [1], [1], "multiple of block_size=4"),
        (0, [1], [1], "positive multiple"),
        (4, [1, 3], [9, 2], "request 1 has 2 keys"),
    ],
)
def test_chunks_that_cannot_be_are_refused(chunk, q_lens, kv_lens, match):
    with pytest.raises(ValueError, match=match):
        virtual(chunk, 4, q_lens, kv_lens)


@given(
    case=cases(causal=True, window=None, alibi=False, block_size=16, layout="NHD", head_size=32),
    blocks=st.integers(1, 3),
)
def test_each_query_sees_its_chunk_up_to_itself(step_path, case, blocks):
    """The oracle takes the chunks of each request one by one."""
    chunk = 16 * blocks
    case = case.replace(lengths=tuple((q, n if q else 0) for q, n in case.lengths))
    made = Made(step_path, case, ChunkedLocalAttentionBuilder, attention_chunk_size=chunk)
    metadata = made.builder.build(0, made.common)
    out, args = made.run(metadata), made.arguments()
    row = 0
    for request, (q_len, context) in enumerate(case.lengths):
        for first in range(context // chunk * chunk, context + q_len, chunk):
            last = min(first + chunk, context + q_len)
            rows = last - max(first, context)
            if rows <= 0:
                continue
            blocks_of = slice(first // 16, -(-last // 16))
            one = {
                "q": args["q"][row : row + rows],
                "cu_seqlens_q": np.array([0, rows], np.int32),
                "seqused_k": np.array([last - first], np.int32),
                "block_table": args["block_table"][request : request + 1, blocks_of],
            }
            scales = ("q_descale", "k_descale", "v_descale")
            one.update({n: args[n][:1] for n in scales if n in args})
            right = expect_attention(**{**args, **one}, out_dtype=made.case.dtype)
            right.check(out[row : row + rows])
            row += rows
    assert row == len(out)


def test_other_groups_use_the_same_cuts(step_path):
    case = Case(((5, 40), (1, 70)), num_kv_heads=2)
    made = Made(step_path, case, ChunkedLocalAttentionBuilder, attention_chunk_size=32)
    metadata = made.builder.build(0, made.common)
    table = made.common.block_table_tensor + 1
    other = made.builder.update_block_table(metadata, table, metadata.slot_mapping)
    again = Made(step_path, case, ChunkedLocalAttentionBuilder, attention_chunk_size=32).builder
    again = again.update_block_table(metadata, table, metadata.slot_mapping)
    assert step_path.host(metadata.block_table).shape == (2, 2)
    for found in (other, again):
        moved = step_path.host(found.block_table) - step_path.host(metadata.block_table)
        assert (moved == 1).all()


def test_local_layers_take_no_shared_prefix_no_ranks_and_no_graph(step_path):
    case = Case(((1, 40), (1, 70)), prefix=32)
    made = Made(step_path, case, ChunkedLocalAttentionBuilder, attention_chunk_size=64)
    assert not made.builder.use_cascade_attention(4096, [1] * 64, 8, 2, *[False] * 3, 132, 1)
    with pytest.raises(ValueError, match="local to chunks"):
        made.builder.build(32, made.common)
    with pytest.raises(NotImplementedError, match="captured"):
        made.builder.build_for_cudagraph_capture(made.common)
    with pytest.raises(NotImplementedError, match="causal"):
        made.builder.build(0, Made(step_path, case.replace(causal=False)).common)
    with pytest.raises(ValueError, match="attention_chunk_size is None"):
        Made(step_path, case, ChunkedLocalAttentionBuilder)
    with pytest.raises(NotImplementedError, match="dcp_world_size=2"):
        Made(
            step_path, case, ChunkedLocalAttentionBuilder, attention_chunk_size=64, dcp_world_size=2
        )
