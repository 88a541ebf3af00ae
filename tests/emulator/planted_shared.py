"""Bugs planted in the kernels of shared prefixes."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from dataclasses import dataclass

from prefixes import SHARED, make_shared, once

from .planted import Planted

__all__ = ["PLANTED_SHARED"]

KERNEL, SCHEDULE = "attention_shared_sm90.cu", "schedule_shared.cu"
_PAIR = SHARED.replace(lengths=((1, 420), (1, 300)), num_heads_kv=1, head_dim=64)
_FULL = SHARED.replace(lengths=((1, 470),) * 20, num_heads_kv=1, head_dim=64)  # two warpgroups
_LONG = _FULL.replace(lengths=((1, 1200),) * 20)  # more blocks than stages
_SHORT = SHARED.replace(lengths=((0, 0), (4, 60), (1, 200), (1, 100)), group_size=1)


@dataclass(frozen=True)
class PlantedShared(Planted):
    """With a prefix that all requests share."""

    keys: int = 256

    def attend(self) -> None:
        inputs, tree = make_shared(self.case, [(range(len(self.case.lengths)), self.keys)])
        if self.case is _SHORT:
            inputs.args["block_table"][0, :] = 2**31 - 1
        inputs.check(once(tree))


def _body(function: str) -> str:
    """The body of a function without parameters of its own."""
    return rf"(\bvoid {function}\([^)]*\)(?: const)?) \{{[^}}]*\}}"


PLANTED_SHARED = [
    PlantedShared("shared: nothing", KERNEL, "", "", _FULL),
    PlantedShared("shared: nothing, in turns", KERNEL, "", "", _PAIR),
    PlantedShared("shared: nothing, some leave", SCHEDULE, "", "", _SHORT, keys=64),
    PlantedShared("shared: no wait for keys", KERNEL, r"mbarrier_wait\(base \+ S::kKeyFull \+ 8 \* slot, phase\);(\s*wgmma_fence)", r"\1", _FULL),
    PlantedShared("shared: no wait for values", KERNEL, _body("wait_for_values"), r"\1 {}", _FULL),
    PlantedShared("shared: values of the wrong phase", KERNEL, r"before > slot \? 1u : 0u", "before > slot ? 0u : 1u", _PAIR),
    PlantedShared("shared: a stage is given back by half of the warps", KERNEL, r"(kKeyEmpty \+ 8 \* i), 8\)", r"\1, 4)", _LONG, keys=1152),
    PlantedShared("shared: no proxy fence after rows are gathered", KERNEL, _body("fence_async_proxy"), r"\1 {}", _FULL),
    PlantedShared("shared: rows are multiplied before all are there", KERNEL, r"fence_async_proxy\(\);\s*named_barrier_sync\(2 \+ group, 128\);", "fence_async_proxy();", _FULL),
    PlantedShared("shared: one key too many is seen", KERNEL, r"8 \* n >= limit", "8 * n > limit", _FULL, keys=272),
    PlantedShared("shared: both warpgroups take all blocks", KERNEL, r"const int first = walk\.halves \? group : 0", "const int first = 0", _PAIR),
    PlantedShared("shared: the merge does not wait", KERNEL, r"mbarrier_wait\(base \+ S::kOpen, 0\);", ";", _FULL),
    PlantedShared("shared: counter without order", KERNEL, r"atom\.acq_rel\.gpu\.global\.inc", "atom.relaxed.gpu.global.inc", _FULL),
    PlantedShared("shared: own keys of the wrong phase", KERNEL, r"(mbarrier_wait\(barrier \+ stage \* 8, parity)\);", r"\1 ^ 1);", _FULL),
    PlantedShared("shared: own keys are refilled too early", KERNEL, r"__syncwarp\(\);(\s*ask\(stage\))", r"\1", _FULL.replace(lengths=((1, 900),) * 20)),
    PlantedShared("shared: keys that a row does not see", SCHEDULE, r"node\[l\]\.y <= seen\)", "node[l].y <= kv_len)", _SHORT, keys=64),
    PlantedShared("shared: the table row of one that left", SCHEDULE, r"x\.tokens_before\[l\]\[first\] == before\[2 \+ l\]", "i == first", _SHORT, keys=64),
]  # fmt: skip
