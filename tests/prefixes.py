"""Batches of requests that share leading pages."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cupyflash.attention import describe_call
from cupyflash.cascade import cascade_attention
from cupyflash.prefix_tree import PrefixTree, prefix_tree
from cupyflash.shared_prefix import attend_once, get_prefix_schedule, sharing_of_tree
from cupyflash.testing import Case

__all__ = [
    "SHARED",
    "cascade",
    "check_nodes",
    "fp8_cases",
    "make_shared",
    "once",
    "schedule_of",
    "sets_of",
    "share_pages",
    "shared_cases",
    "through",
]

SHARED = Case(
    lengths=((1, 200), (1, 150), (1, 170), (1, 90)), num_heads_kv=2, group_size=4, head_dim=128,
    page_size=16, q_type="bf16", kv_type="bf16", causal=True,
)  # fmt: skip

_CONTEXTS = st.one_of(
    st.integers(-1, 40), st.integers(50, 400), st.sampled_from([15, 63, 64, 127, 128, 255])
)


def share_pages(inputs, groups):
    """Members of a group read the pages of its first one; those with fewer keys keep their own."""
    table, page = inputs.args["block_table"], inputs.case.page_size
    for members, keys in sorted(groups, key=lambda group: group[1]):
        long = [r for r in sorted(members) if inputs.case.kv_lens[r] >= keys]
        for r in long[1:]:
            table[r, : keys // page] = table[long[0], : keys // page]


def given_tree(tree, xp):
    return PrefixTree(tree.batch, tree.levels, xp.asarray(tree.buffer))


def once(tree, **more):
    """What `cascade_attention` calls, with the arguments of ``flash_attn_varlen_func``."""

    def attention(*, out, lse, **args):
        call = describe_call(out=out, lse=lse, **args, **more)
        refused = attend_once(call, sharing_of_tree(tree), 3, None)
        assert not refused, refused
        return out, lse

    return attention


def cascade(inputs, tree, **more):
    """`cascade_attention` of a case with a tree, checked."""
    args, out = inputs.args, inputs.placed["out"].view
    cascade_attention(
        out, args["q"], args["k"], args["v"], args["cu_seqlens_q"], args["max_seqlen_q"], None,
        None, args["seqused_k"], args["max_seqlen_k"], args["softmax_scale"],
        args.get("alibi_slopes"), args["window_size"], args["softcap"], args["block_table"], 0, 0,
        None, prefix_tree=tree, s_aux=args.get("s_aux"), fp8_dtype=args.get("fp8_dtype", "e4m3"),
        **more,
    )  # fmt: skip
    inputs.expected().check(out)


def schedule_of(inputs, tree, **more):
    """Made ahead, for `cascade`."""
    args, case = inputs.args, inputs.case
    return get_prefix_schedule(
        len(case.lengths), args["q"].shape[0], args["max_seqlen_q"], args["max_seqlen_k"],
        case.num_heads_q, case.num_heads_kv, case.head_dim, args["seqused_k"], case.kv_type,
        args["cu_seqlens_q"], case.page_size, prefix_tree=tree,
        sliding_window=case.window_size, **more,
    )  # fmt: skip


def through(kernel, device):
    """Whether a kernel ran; `device` is the emulated one."""
    return any(kernel in report.symbol for report in device.reports)


@st.composite
def _groups(draw, members, begin, limits, page, depth):
    """Groups of these requests, and groups inside of them."""
    found, left = [], list(draw(st.permutations(members)))
    while left and depth:
        count = draw(st.integers(1, len(left)))
        group, left = left[:count], left[count:]
        seeing = [r for r in group if limits[r] > begin]
        if not seeing or draw(st.integers(0, 4)) == 0:
            continue
        longest = min(limits[r] for r in seeing) // page
        if longest * page <= begin:
            continue
        keys = page * draw(st.integers(begin // page + 1, longest))
        found.append((seeing if draw(st.booleans()) else group, keys))
        found += draw(_groups(seeing, keys, limits, page, depth - 1))
    return found


@st.composite
def shared_cases(draw, most_requests=10):
    """A case that the kernel takes, and its groups."""
    head_dim = draw(st.sampled_from([128, 64, 80, 32]))
    group = draw(st.sampled_from([4, 1, 2, 3, 5, 7, 8, 12, 16]))
    q_len = st.one_of(st.just(1), st.integers(0, 16 // group), st.integers(0, 64 // group))
    lengths = draw(
        st.lists(st.tuples(q_len, _CONTEXTS), min_size=1, max_size=most_requests).filter(
            lambda pairs: any(q for q, _ in pairs)
        )
    )
    causal, window = draw(st.booleans()), draw(st.sampled_from([-1, -1, 0, 30, 100, 250]))
    kv_type = draw(st.sampled_from(["bf16", "fp16"]))
    case = Case(
        lengths=tuple(lengths), num_heads_kv=draw(st.integers(1, 3)), group_size=group,
        head_dim=head_dim, page_size=draw(st.sampled_from([16, 32, 48, 64, 128])),
        q_type=kv_type, kv_type=kv_type, causal=True, sink=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        alibi=draw(st.sampled_from(["", "", "head", "request"])),
        softmax_scale=draw(st.sampled_from([None, None, -0.3])),
        layout=draw(st.sampled_from(["NHD", "HND", "strided"])), seed=draw(st.integers(0, 99)),
    ).replace(causal=causal, window_size=(window, 0 if causal else -1))  # fmt: skip
    limits = [kv - (q - 1) if q else 0 for q, kv in zip(case.q_lens, case.kv_lens, strict=True)]
    groups = draw(_groups(range(len(lengths)), 0, limits, case.page_size, 3))
    return case, groups


@st.composite
def fp8_cases(draw, most_requests=10):
    """The same with an 8-bit cache."""
    case, groups = draw(shared_cases(most_requests))
    q_type = draw(st.sampled_from(["bf16", "fp16", "bf16", "e4m3", "e5m2"]))
    kv_type = draw(st.sampled_from(["e4m3", "e4m3", "e5m2"]))
    return case.replace(q_type=q_type, kv_type=kv_type, descale=draw(st.booleans())), groups


def make_shared(case, groups, xp=np):
    inputs = case.make(xp)
    share_pages(inputs, groups)
    return inputs, given_tree(prefix_tree(groups, len(case.lengths)), xp)


def sets_of(tree):
    """The groups of every level."""
    return [
        {
            (frozenset(tree.order[at : at + count].tolist()), int(keys))
            for at, (count, keys) in enumerate(level)
            if count > 0
        }
        for level in tree.nodes
    ]


def check_nodes(tree):
    """Places of a group are neighbours, its first one says how many they are."""
    for level in tree.nodes:
        for at, (count, keys) in enumerate(level):
            if count > 0:
                members = level[at : at + count]
                assert members[:, 0].tolist() == [count, *range(-1, -count, -1)]
                assert (members[:, 1] == keys).all()
