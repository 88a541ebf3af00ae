"""One rank's share of each sequence, as a call states it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash.runtime.arrays import place, spec_of
from cupyflash.runtime.problem import AttentionProblem

from .numbers import non_negative
from .sequences import check_lengths

if TYPE_CHECKING:
    from cupyflash.runtime.call import Call

__all__ = ["Share", "share_of", "with_share"]


class Share(NamedTuple):
    """Every ``size``-th key of a sequence, from key ``rank`` on.

    Attributes
    ----------
    size, rank : int
    totals : array [batch], int32
        Keys of each whole sequence.
    """

    size: int
    rank: int
    totals: Any


def share_of(cp_world_size: int, cp_rank: int, cp_tot_seqused_k: Any) -> Share | None:
    """The share that a call names; None if it names none.

    Raises
    ------
    ValueError
        A rank that is not one of the group's, or lengths that are missing or too many.
    """
    size = non_negative("cp_world_size", cp_world_size)
    rank = non_negative("cp_rank", cp_rank)
    if not rank < size:
        raise ValueError(f"cp_rank={rank} must be one of cp_world_size={size}: 0 to {size - 1}")
    if (cp_tot_seqused_k is None) != (size == 1):
        given = "is None" if cp_tot_seqused_k is None else "is given"
        raise ValueError(
            f"cp_tot_seqused_k {given} with cp_world_size={size}: it says how long sequences are "
            "on all ranks together, so there is one exactly where there are several"
        )
    return None if size == 1 else Share(size, rank, cp_tot_seqused_k)


def with_share(call: Call, share: Share) -> tuple[AttentionProblem, Any]:
    """The problem over a share, and the lengths of whole sequences as a NumPy array [batch].

    Raises
    ------
    NotImplementedError
        On a GPU: no kernel has the mask.
    TypeError, ValueError
        Lengths of another dtype or size, or on a GPU.
    """
    if not call.on_host:
        raise NotImplementedError(
            f"cp_world_size={share.size}: kernels do not mask a rank's share of a sequence; attend "
            "to the context without a mask and merge the states, as cupyflash.distributed does, "
            "or pass NumPy arrays"
        )
    (totals, _), _ = place(("cp_tot_seqused_k", "q"), (share.totals, call.arrays.q))
    check_lengths("cp_tot_seqused_k", spec_of(totals), call.problem.batch)
    if (totals < 0).any():
        raise ValueError(f"cp_tot_seqused_k[{int(totals.argmin())}]={totals.min()} is negative")
    problem = replace(call.problem, cp_world_size=share.size, cp_rank=share.rank)
    return problem, totals.astype(np.int64)
