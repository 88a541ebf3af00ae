"""The kernels of shared prefixes on a GPU: random trees, many requests, captured graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import SHARED, cascade, make_shared, once, schedule_of, shared_cases
from repeats import check_repeats

from cupyflash.prefix_tree import PrefixTree, prefix_tree
from cupyflash.testing import expect_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


@settings(max_examples=100)
@given(drawn=shared_cases(most_requests=40), most=st.sampled_from([0, 0, 2, 5]))
@pytest.mark.parametrize("share", range(12))
def test_any_tree_is_attention(drawn, most, share):
    import cupy

    inputs, tree = make_shared(*drawn, cupy)
    check_repeats(inputs, once(tree, num_splits=most))


@given(drawn=shared_cases(most_requests=40))
def test_any_tree_with_a_schedule_made_ahead(drawn):
    import cupy

    case, groups = drawn
    case = case.replace(causal=True, window_size=(case.window_size[0], 0))
    inputs, tree = make_shared(case, groups, cupy)
    cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("requests", "prefix"), [(3, 4096), (3, 16), (70, 1008), (300, 16), (300, 208)]
)
def test_many_requests(head_dim, requests, prefix):
    import cupy

    rng = np.random.default_rng(requests)
    lengths = tuple((1, prefix + int(n)) for n in rng.integers(0, 40, requests))
    case = SHARED.replace(lengths=lengths, head_dim=head_dim, num_heads_kv=1)
    everyone = list(range(requests))
    groups = [(everyone, prefix), (everyone[::2], prefix + 16)]
    groups[1:] = [(r, k) for r, k in groups[1:] if all(case.kv_lens[i] >= k for i in r)]
    cascade(*make_shared(case, groups, cupy))


def test_a_graph_follows_the_tree_and_the_lengths():
    import cupy

    case = SHARED.replace(lengths=((1, 300),) * 8)
    everyone = list(range(8))
    buffer = cupy.zeros((2 * 2 + 1) * 8, np.int32)
    inputs, _ = make_shared(case, [], cupy)
    tree = prefix_tree([], 8, levels=2, out=buffer)
    cascade(inputs, tree)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cascade(inputs, tree)
        stream.synchronize()
        stream.begin_capture()
        call = once(tree)
        call(**inputs.args, out=inputs.placed["out"].view, lse=None)
        graph = stream.end_capture()
    table, used = inputs.args["block_table"], inputs.args["seqused_k"]
    for groups, shorter in (
        ([(everyone, 128)], 0), ([(everyone, 64), (everyone[1::2], 192)], 30), ([], 200),
    ):  # fmt: skip
        for members, keys in groups:
            table[cupy.asarray(members), : keys // 16] = table[members[0], : keys // 16]
        prefix_tree(groups, 8, levels=2, out=buffer)
        used[...] = 301 - shorter
        graph.launch(cupy.cuda.Stream.null)
        cupy.cuda.Device().synchronize()

        expect_attention(**inputs.args).check(inputs.placed["out"].view)


_LATE = """extern "C" __global__ void late(const int *from, int *to, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 60; ++i) __nanosleep(500);
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}"""


@pytest.mark.parametrize("requests", [3, 70])
@pytest.mark.parametrize("reach", [1, 400, 2**31 - 1])
def test_lengths_that_the_launch_in_front_writes_while_this_one_starts(requests, reach):
    """They are read before it is over, and have to be read again."""
    import cupy

    rng = np.random.default_rng(requests)
    case = SHARED.replace(lengths=tuple((1, 300 + int(n)) for n in rng.integers(0, 90, requests)))
    inputs, tree = make_shared(case, [(range(requests), 256)], cupy)
    parts = [tree.buffer, inputs.args["seqused_k"], inputs.args["cu_seqlens_q"]]
    right = cupy.concatenate(parts)
    live = right.copy()
    tree = PrefixTree(tree.batch, tree.levels, live[: tree.buffer.size])
    at = tree.buffer.size
    inputs.args["seqused_k"], inputs.args["cu_seqlens_q"] = (
        live[at : at + requests], live[at + requests :],
    )  # fmt: skip
    late = cupy.RawKernel(_LATE, "late")
    cascade(inputs, tree)
    for _ in range(5):
        live[...] = right + cupy.asarray(rng.integers(-reach, reach, live.size).astype(np.int32))
        inputs.placed["out"].view[...] = 0
        cupy.cuda.Device().synchronize()
        late((1,), (256,), (right, live, np.int32(live.size)))
        cascade(inputs, tree)


@pytest.mark.parametrize("requests", [5, 300, 700])
def test_a_tree_is_found_with_its_schedule(requests):
    import cupy

    rng = np.random.default_rng(requests)
    case = SHARED.replace(
        lengths=tuple((1, 300 + int(n)) for n in rng.integers(0, 90, requests)), num_heads_kv=1
    )
    groups = [(range(requests), 128), (range(0, requests, 2), 256)]
    inputs, host = make_shared(case, groups, cupy)
    tree = PrefixTree(requests, 2, cupy.full(5 * requests, 99, np.int32))
    made = schedule_of(inputs, tree, block_table=inputs.args["block_table"])
    cascade(inputs, tree, prefix_scheduler_metadata=made)
    assert (tree.nodes[0] == host.nodes[0]).all()
