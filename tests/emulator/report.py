"""What a launch counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .loader import Program

__all__ = ["EmulatorError", "Report"]


class EmulatorError(Exception):
    """The kernel did something wrong while it ran: race, bounds, deadlock, rule violation."""


@dataclass
class Report:
    """Counters of one launch.

    Attributes
    ----------
    bytes_read, bytes_written : list of int
        Per registered array, in the order given (copies into shared memory count as reads).
    stats : dict
        Totals: ``uninitialised`` reads of shared memory, bytes by space, ``wavefronts``, ``steps``.
    """

    symbol: str
    bytes_read: list[int]
    bytes_written: list[int]
    stats: dict[str, int]
    seconds: float
    program: Program = field(repr=False)
    hits: np.ndarray = field(repr=False)
    conflict_hits: np.ndarray = field(repr=False)
    extra: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def instructions(self) -> dict[str, int]:
        """Warp instructions executed, by PTX mnemonic."""
        return self.program.by_mnemonic(self.hits)

    @cached_property
    def conflicts(self) -> dict[str, int]:
        """Shared-memory wavefronts beyond the least possible, by ``file:line (ptx)``."""
        at = np.flatnonzero(self.conflict_hits).tolist()
        return {self.program.where(i): int(self.conflict_hits[i]) for i in at}

    @property
    def steps(self) -> int:
        """Warp instructions executed."""
        return self.stats["steps"]

    @property
    def mma_count(self) -> int:
        """Tensor-core instructions executed (a wgmma counts once for each of its four warps)."""
        return sum(n for k, n in self.instructions.items() if k.startswith(("mma.", "wgmma.mma")))

    @property
    def bank_conflicts(self) -> int:
        return int(self.conflict_hits.sum())

    def count(self, prefix: str) -> int:
        """Instructions whose mnemonic starts with ``prefix``."""
        return sum(n for k, n in self.instructions.items() if k.startswith(prefix))

    def by_kind(self) -> dict[str, int]:
        """Instructions by the first part of the mnemonic."""
        out: Counter[str] = Counter()
        for name, n in self.instructions.items():
            out[name.split(".")[0]] += n
        return dict(out.most_common())
