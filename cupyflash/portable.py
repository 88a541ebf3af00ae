"""The portable kernels, version 2: compute capability 8.0 and later."""

from __future__ import annotations

from typing import Any

import numpy as np

from .runtime.arrays import array_module, on_stream
from .runtime.attention_launch import attend as attend_heads
from .runtime.attention_plan import attention_plans as plans_of_heads
from .runtime.call import Call
from .runtime.device import DeviceInfo
from .runtime.mla_launch import attend_latent
from .runtime.mla_plan import mla_plans
from .runtime.plan import Plan
from .runtime.problem import AttentionProblem

__all__ = ["attend", "attention_plans", "write_schedule"]


def attend(call: Call, scheduler_metadata: Any, workspace: Any, stream: Any) -> tuple[Any, Any]:
    """Queue attention of every request; see `attention_launch.attend`, `mla_launch`."""
    if call.problem.has_q_v:
        return attend_latent(call, workspace, stream)
    return attend_heads(call, scheduler_metadata, workspace, stream)


def attention_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch that calls within a problem's bounds may need, those of the problem first."""
    return (mla_plans if problem.has_q_v else plans_of_heads)(problem, info)


def write_schedule(bounds: Any, seqused_k: Any, cu_seqlens_q: Any, out: Any, stream: Any) -> Any:
    """The header of a schedule, and zeros behind it.

    There is nothing more to it: the kernels find their work from the lengths, so a captured graph
    follows lengths that change.
    """
    from .scheduler_metadata import HEADER, SchedulerMetadata

    del cu_seqlens_q
    module = array_module(seqused_k)
    with on_stream(seqused_k, stream):
        buffer = module.empty(HEADER, np.int32) if out is None else out
        words = (*SchedulerMetadata(None, bounds).parameter_hash, bounds.batch, 0)
        for i, word in enumerate(words):
            buffer[i : i + 1].fill(word)
        buffer[HEADER:].fill(0)
    return buffer
