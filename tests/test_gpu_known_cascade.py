"""Shared prefixes on a GPU, queued as an earlier call was: with what their arrays hold now."""

from __future__ import annotations

import numpy as np
import pytest
from prefixes import SHARED, make_shared, schedule_of

from cupyflash import cascade_attention
from cupyflash.prefix_tree import prefix_tree
from cupyflash.runtime.workspace import free_workspaces
from cupyflash.testing import expect_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
BATCH = 8


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kv_type", ["bf16", "e4m3"])
@pytest.mark.parametrize("window", [-1, 200])
def test_what_arrays_hold_now_is_what_counts(again, kv_type, ahead, window):
    import cupy

    changes = {"kv_type": kv_type, "descale": kv_type != "bf16"}
    case = SHARED.replace(lengths=((1, 300),) * BATCH, window_size=(window, 0), **changes)
    inputs, _ = make_shared(case, [], cupy)
    args, out = inputs.args, inputs.placed["out"].view
    table, used = args["block_table"], args["seqused_k"]
    buffer = cupy.zeros(5 * BATCH, np.int32)
    tree = prefix_tree([], BATCH, levels=2, out=buffer)
    memory = schedule_of(inputs, tree).buffer if ahead else None
    scales = {name: args.get(name) for name in ("q_descale", "k_descale", "v_descale")}

    def attend():
        out.view(cupy.uint16).fill(0xFFFF)
        made = schedule_of(inputs, tree, out=memory) if ahead else None
        cascade_attention(
            out, args["q"], args["k"], args["v"], args["cu_seqlens_q"], args["max_seqlen_q"],
            None, None, used, args["max_seqlen_k"], args["softmax_scale"], None,
            args["window_size"], args["softcap"], table, 0, 0, None, made, None, **scales,
            fp8_dtype=args.get("fp8_dtype", "e4m3"), prefix_tree=tree,
        )  # fmt: skip

    attend()
    everyone = list(range(BATCH))
    for groups, keys in (
        ([(everyone, 128)], 301), ([(everyone, 64), (everyone[1::2], 192)], 271), ([], 101),
    ):  # fmt: skip
        for members, shared in groups:
            table[cupy.asarray(members), : shared // 16] = table[members[0], : shared // 16]
        prefix_tree(groups, BATCH, levels=2, out=buffer)
        used[...] = keys
        for scale in scales.values():
            if scale is not None:
                scale *= 1.25
        if keys == 271:
            free_workspaces()
            attend()  # scratch memory lies elsewhere: planned anew
        times = len(again)
        attend()
        assert len(again) == times + 1
        expect_attention(**args).check(out)
