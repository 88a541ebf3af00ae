"""The portable kernels, version 2: compute capability 8.0 and later."""

from __future__ import annotations

from typing import Any

import numpy as np

from .runtime.arrays import array_module, on_stream
from .runtime.attention_launch import attend
from .runtime.attention_plan import attention_plans

__all__ = ["attend", "attention_plans", "write_schedule"]


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
