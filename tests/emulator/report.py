"""What a launch counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["EmulatorError", "Report"]


class EmulatorError(Exception):
    """The kernel did something wrong while it ran: race, bounds, deadlock, rule violation."""


@dataclass
class Report:
    """Counters of one launch.

    Attributes
    ----------
    instructions : dict
        Warp instructions executed, by PTX mnemonic.
    conflicts : dict
        Shared-memory wavefronts beyond the least possible, by ``file:line (ptx)``; only those > 0.
    bytes_read, bytes_written : list of int
        Per registered array, in the order given (copies into shared memory count as reads).
    stats : dict
        Totals: ``uninitialised`` reads of shared memory, bytes by space, ``wavefronts``, ``steps``.
    """

    symbol: str
    instructions: dict[str, int]
    conflicts: dict[str, int]
    bytes_read: list[int]
    bytes_written: list[int]
    stats: dict[str, int]
    seconds: float
    hits: np.ndarray = field(repr=False)
    extra: dict[str, Any] = field(default_factory=dict)

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
        return sum(self.conflicts.values())

    def count(self, prefix: str) -> int:
        """Instructions whose mnemonic starts with ``prefix``."""
        return sum(n for k, n in self.instructions.items() if k.startswith(prefix))

    def by_kind(self) -> dict[str, int]:
        """Instructions by the first part of the mnemonic."""
        out: Counter[str] = Counter()
        for name, n in self.instructions.items():
            out[name.split(".")[0]] += n
        return dict(out.most_common())
