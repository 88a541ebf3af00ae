"""Bugs planted in the kernels of shared prefixes."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from prefixes import SHARED, cascade, check_nodes, make_shared, once, schedule_of, sets_of

from cupyflash.prefix_search import find_prefix_tree
from cupyflash.prefix_tree import PrefixTree

from .device import device_array
from .planted import Planted, check

__all__ = ["KERNEL", "LATE_CASES", "PLANTED_SHARED", "PlantedShared"]

KERNEL, SEARCH = "attention_shared_sm90.cu", "find_prefixes.cu"
SCHEDULE, SHARE = "schedule_shared.cu", "share_prefixes.cu"
_EARLY = r"const Lengths found\(p, s, threadIdx\.x\);([\s\S]*?)found\.changed\(p, s, threadIdx\.x\)"
_PAIR = SHARED.replace(lengths=((1, 420), (1, 300)), num_heads_kv=1, head_dim=64)
_FULL = SHARED.replace(lengths=((1, 470),) * 20, num_heads_kv=1, head_dim=64)  # two warpgroups
_MANY = _FULL.replace(lengths=((1, 1300),) * 20)  # rows to be merged by whom has their own keys
_UNEVEN = _FULL.replace(lengths=tuple((1, 300 + 37 * n) for n in range(20)))  # or by others
_LONG = _FULL.replace(lengths=((1, 1200),) * 20)  # more blocks than stages
_WINDOW = SHARED.replace(lengths=((1, 300), (2, 280), (1, 330), (1, 290)), window_size=(200, 0))
_ROWS = SHARED.replace(lengths=((5, 300), (2, 280)))  # more than read own keys together
_ALIBI = _FULL.replace(lengths=((1, 270),) * 20, alibi="head")  # shared keys are near
_SHORT = SHARED.replace(lengths=((0, 0), (4, 60), (1, 200), (1, 100)), group_size=1)
_FEW = _UNEVEN.replace(lengths=((1, 330), (1, 467), (1, 301), (2, 390)))  # a schedule of two warps
_FAR = _FEW.replace(lengths=((1, 1800), (1, 1900)))  # more blocks a CTA than stages
LATE_CASES = {"full": _FULL, "pair": _PAIR, "uneven": _UNEVEN, "window": _WINDOW}


@dataclass(frozen=True)
class PlantedShared(Planted):
    """With a prefix that all requests share."""

    keys: int = 256
    ahead: bool = False
    found: bool = False  # with the tree, by one launch

    def attend(self) -> None:
        inputs, tree = make_shared(self.case, [(range(len(self.case.lengths)), self.keys)])
        if self.found:
            batch, table = len(self.case.lengths), inputs.args["block_table"]
            table[::2, self.keys // 16] = table[0, self.keys // 16]
            tree = PrefixTree(batch, 2, device_array(4 * batch + batch, np.int32, 99))
            made = schedule_of(inputs, tree, block_table=table)
            cascade(inputs, tree, prefix_scheduler_metadata=made)
            return
        if self.ahead:
            cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))
            return
        if self.case is _SHORT:
            inputs.args["block_table"][0, :] = 2**31 - 1
        check(inputs, once(tree), self.keys)


@dataclass(frozen=True)
class PlantedSearch(Planted):
    """In the search for shared blocks; two levels, compared in two parts."""

    def attend(self) -> None:
        requests, columns = 80, 300
        table = np.arange(requests * columns, dtype=np.int32).reshape(requests, columns)
        table[::2, :280], table[1::2, :20] = table[0, :280], table[1, :20]
        table[1::4, 20:40] = table[1, 20:40]
        table[64, 265:280] = -2 - np.arange(15)
        table[[72, 76], 265] = table[1, 20]  # next of two groups, second in a turn
        lengths = np.full(requests, 16 * columns, np.int32)
        lengths[5] = 16 * 35 + 1  # its last block is not shared
        found = find_prefix_tree(table, lengths, 16)
        assert sorted(found.order) == list(range(requests))
        check_nodes(found)
        even, odd = (frozenset(range(first, requests, 2)) for first in (0, 1))
        outer, inner, _ = sets_of(found)
        assert outer == {(even, 16 * 265), (odd, 16 * 20)}, outer
        assert (frozenset(range(1, requests, 4)), 16 * 35) in inner, inner
        assert (frozenset([72, 76]), 16 * 280) in inner, inner


def _body(function: str) -> str:
    """The body of a function without parameters of its own."""
    return rf"(\bvoid {function}\([^)]*\)(?: const)?) \{{[^}}]*\}}"


PLANTED_SHARED = [
    PlantedShared("shared: nothing", KERNEL, "", "", _FULL),
    PlantedShared("shared: nothing, in turns", KERNEL, "", "", _PAIR),
    PlantedShared("shared: nothing, some leave", KERNEL, "", "", _SHORT, keys=64),
    PlantedShared("shared: no wait for keys", KERNEL, r"mbarrier_wait\(base \+ S::kKeyFull \+ 8 \* slot, phase\);(\s*wgmma_fence)", r"\1", _FULL),
    PlantedShared("shared: no wait for values", KERNEL, _body("wait_for_values"), r"\1 {}", _FULL),
    PlantedShared("shared: values of the wrong phase", KERNEL, r"before > slot \? 1u : 0u", "before > slot ? 0u : 1u", _PAIR),
    PlantedShared("shared: a stage is given back by half of the warps", KERNEL, r"(kKeyEmpty \+ 8 \* i), 8\)", r"\1, 4)", _LONG, keys=1152),
    PlantedShared("shared: no proxy fence after rows are gathered", KERNEL, _body("fence_async_proxy"), r"\1 {}", _FULL),
    PlantedShared("shared: rows are multiplied before all are there", KERNEL, r"fence_async_proxy\(\);\s*named_barrier_sync\(2 \+ group, 128\);", "fence_async_proxy();", _FULL),
    PlantedShared("shared: one key too many is seen", KERNEL, r"8 \* n >= limit", "8 * n > limit", _FULL, keys=272),
    PlantedShared("shared: both warpgroups take all blocks", KERNEL, r"const int first = walk\.halves \? group : 0", "const int first = 0", _PAIR),
    PlantedShared("shared: the merge does not wait", KERNEL, r"mbarrier_wait\(base \+ S::kOpen, 0\);", ";", _UNEVEN),
    PlantedShared("shared: shared keys of other blocks are not waited for", KERNEL, r"if \(!V::kParts\) mbarrier_wait\(base \+ S::kTilesOpen, 0\);", ";", _MANY, keys=1152, num_sms=4),
    PlantedShared("shared: own keys are not waited for", KERNEL, r"load_acquire_shared\(at\) < of\.line_end", "false", _MANY, num_sms=4),
    PlantedShared("shared: one of two warps is waited for", KERNEL, r"\(\(1 << count\) - 1\) << from", "1 << from", _MANY, num_sms=20),
    PlantedShared("shared: own keys are told of without order", KERNEL, r"st\.release\.cta\.shared", "st.relaxed.cta.shared", _MANY, num_sms=4),
    PlantedShared("shared: rows are merged in two places", KERNEL, r"here != \(row\.warps != 0\)", "false", _UNEVEN),
    PlantedShared("shared: counter without order", KERNEL, r"atom\.acq_rel\.gpu\.global\.inc", "atom.relaxed.gpu.global.inc", _FULL),
    PlantedShared("shared: own keys of the wrong phase", KERNEL, r"(mbarrier_wait\(barrier \+ stage \* 8, parity)\);", r"\1 ^ 1);", _FULL),
    PlantedShared("shared: own keys are refilled too early", KERNEL, r"__syncwarp\(\);(\s*ask\(stage\))", r"\1", _FULL.replace(lengths=((1, 900),) * 20)),
    PlantedShared("shared: keys that a row does not see", KERNEL, r"end <= seen\)", "end <= own.kv_len)", _SHORT, keys=64),
    PlantedShared("shared: the table row of one that left", KERNEL, r"x\.tokens_before\[l\]\[first\] == before\[2 \+ l\]", "i == first", _SHORT, keys=64),
    PlantedShared("shared: rows are merged before it is known how", KERNEL, r"(const bool tiles[^\n]*\n\s*)if constexpr \(V::kInside\) mbarrier_wait\(base \+ S::kRows, 0\);", r"\1;", _FULL),
    PlantedShared("shared: values arrive where the schedule is made", KERNEL, r"mbarrier_wait\(base \+ S::kRows, 0\);([^\n]*memory of values)", r"\1", _FULL),
    PlantedShared("shared: the schedule is read before it is there", KERNEL, r"(schedule\.lists\([^)]*\);\s*fence_async_proxy\(\);)\s*__syncthreads\(\);", r"\1", _FULL),
    PlantedShared("shared: neighbours write the same request", KERNEL, r"s\.own\[at \+ cta\]", "s.own[at]", _FULL),
    PlantedShared("shared: keys that a window hides", KERNEL, r"Place::shared_from\(mine\.all_seen\)", "mine.all_seen & -kShareKeys", _WINDOW),
    PlantedShared("shared: keys between a window and the shared ones", KERNEL, r"begin - first_seen \+ size - 1", "begin - first_seen", _WINDOW),
    PlantedShared("few: nothing", KERNEL, "", "", _FEW, num_sms=16),
    PlantedShared("few: nothing, some leave", KERNEL, "", "", _SHORT, keys=64, num_sms=16),
    PlantedShared("few: the schedule is read before it is there", KERNEL, r"(deal_shared\(of, mine, cta, to\);\s*\}\s*fence_async_proxy\(\);\s*\})\s*__syncthreads\(\);", r"\1", _FEW, num_sms=16),
    PlantedShared("few: values arrive where the schedule is made", KERNEL, r"stage == kStages - 1", "false", _FAR, keys=1792, num_sms=4),
    PlantedShared("few: a warp starts at the next request", KERNEL, r"__popc\(begun\) - 1", "min(__popc(begun), owners - 1)", _FEW, num_sms=16),
    PlantedShared("few: keys that a window hides", KERNEL, r"(begins\[leader\], )Place::shared_from\(mine\.all_seen\)", r"\1mine.all_seen & -kShareKeys", _WINDOW, num_sms=32),
    PlantedShared("few: the table row of one that left", KERNEL, r"x\.tokens_before\[l\]\[first\] == before\[l\]", "i == first", _SHORT, keys=64, num_sms=16),
    PlantedShared("few: the first of two groups has the line of both", KERNEL, r"total \+ upto - work", "total + upto", _FEW, num_sms=16),
    PlantedShared("shared: ALiBi of the first block for all", KERNEL, r"distance\[h\] \+ n \* kShareKeys", "distance[h]", _ALIBI),
    PlantedShared("shared: queries of the first row block", KERNEL, r"row = block \* d\.row_block;", "row = 0;", _ROWS),
    PlantedShared("shared: partial results of one part of a row", KERNEL, r"min\(4 \* k \+ group, last\)", "min(4 * k, last)", _PAIR, num_sms=4),
    PlantedShared("schedule: nothing", SCHEDULE, "", "", _FULL, ahead=True),
    PlantedShared("shared: lengths of before the launch in front", KERNEL, _EARLY, r"Lengths found(p, s, threadIdx.x);\n if (!over) found.keys -= 70;\1false", _FULL),
    PlantedShared("shared: keys are asked for before the launch in front is over", KERNEL, r"if \(!__syncthreads_or\(([^\n]*)\)\) break;", r"if (\1) break;", _FULL),
    PlantedShared("schedule: a row is merged twice", SCHEDULE, r"s\.rows\[other\]\.total = -1;", "put(s.rows[other], row);", _UNEVEN, ahead=True),
    PlantedShared("schedule: tokens of a place are left out", SCHEDULE, r"i = last; i < p\.batch;", "i = last + 1; i < p.batch;", _FULL, ahead=True, switch=False),
    PlantedShared("schedule: warps start at the next request", SCHEDULE, r"own_start\(span, owner_at\(span\.begin\), 0\)", "own_start(span, min(owner_at(span.begin) + 1, owners - 1), 0)", _UNEVEN, ahead=True),
    PlantedShared("schedule: dealt to more warps than there are", SCHEDULE, r"deals_own \? ctas \* kOwnWarps", "deals_own ? 2 * ctas * kOwnWarps", _UNEVEN, ahead=True),
    PlantedShared("schedule: the counter is as it was", SCHEDULE, r"if \(thread < 2\) s\.arrivals\[thread\] = 0;", ";", _FULL, ahead=True),
    PlantedShared("share: nothing", SHARE, "", "", _FULL, found=True),
    PlantedShared("share: places are told of to some", SHARE, r"found && lane < kCtas\) put", "found && lane < kCtas - 1) put", _FULL, found=True),
    PlantedShared("share: dealt before all places are known", SHARE, r"(place\(r, level\);\s*\})\s*cluster_sync\(\);", r"\1", _FULL, found=True),
    PlantedShared("share: one CTA writes for all", SHARE, r"threadIdx\.x \* gridDim\.x \+ blockIdx\.x, gridDim\.x \* kSearch", "threadIdx.x, gridDim.x * kSearch", _FULL, found=True),
    PlantedShared("share: requests as they stand", SHARE, r"request = found\.request\[place\]", "request = place", _FULL, found=True),
    PlantedSearch("search: nothing", SEARCH, "", "", SHARED),
    PlantedSearch("search: a leader that is not the first", SEARCH, r"atomicMin\(&x\.slot\[at\], r\);", "", SHARED),
    PlantedSearch("search: members of different groups", SEARCH, r"leader_before\(level, other\) != before\[e\]", "false", SHARED),
    PlantedSearch("search: ends before all have compared", SEARCH, r"compare\(level\);\s*cluster_sync\(\);", "compare(level);", SHARED),
    PlantedSearch("search: only the first part is compared", SEARCH, r"if \(first\[k\] >= last\[k\]\) continue;", "if (first[k] > 0) continue;", SHARED),
    PlantedSearch("search: one of two requests a turn", SEARCH, r"for \(int k = 0; k < kPairs; \+\+k\) \{(\s*const int leader)", r"for (int k = 0; k < 1; ++k) {\1", SHARED, switch=False),
    PlantedSearch("search: places by the outermost leader alone", SEARCH, r"\(l < level \? x\.leader\[l\]\[r\] : r\)", "(l < 1 ? x.leader[l][r] : r)", SHARED),
    PlantedSearch("search: blocks of this step", SEARCH, r"all - \(q_end - q_begin\)", "all + 15", SHARED),
    PlantedSearch("search: levels end where blocks still are alike", SEARCH, r"a\[k\]\[i\] != b\[k\]\[i\]", "false", SHARED),
]  # fmt: skip
