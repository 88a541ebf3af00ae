"""Every launch of the Hopper decode kernel within bounds."""

from __future__ import annotations

from dataclasses import replace

from .decode_plan import (
    decode_refusal,
    head_bucket,
    make_decode_plan,
    workspace_behind,
)
from .decode_tile import row_tiles
from .device import DeviceInfo
from .plan import Plan
from .problem import AttentionProblem
from .spans import LARGEST_SCAN, schedule_plan

__all__ = ["decode_plans"]


def decode_plans(problem: AttentionProblem, info: DeviceInfo, beside: int = 0) -> list[Plan]:
    """Every launch of the decode kernel that calls within a problem's bounds may need.

    Their workspace is enough for any of the calls, and ``beside`` bytes more for prefill launches
    that take the longer requests.
    """
    if info.capability != (9, 0) or not problem.batch:
        return []
    plans, tiles = [], row_tiles(head_bucket(problem))
    for rows in tiles:
        tokens = min(problem.max_seqlen_q, rows // problem.group_size)
        if tokens:
            largest = replace(problem, max_seqlen_q=tokens)
            if decode_refusal(largest, info):
                continue
            for wanted in (largest, replace(largest, num_splits=1)):  # with less workspace
                plans.append(make_decode_plan(wanted, info).attend)
                if beside and tokens < problem.max_seqlen_q:
                    mixed = make_decode_plan(wanted, info, most_rows=tokens * problem.group_size)
                    behind = workspace_behind(mixed.attend) + beside
                    plans.append(mixed.with_workspace(behind).attend)
    nbytes = max((plan.workspace_bytes for plan in plans), default=0)
    found = list(plans)
    if problem.batch > LARGEST_SCAN:
        found.append(schedule_plan(problem.batch))
    return [replace(plan, workspace_bytes=nbytes) for plan in found]
