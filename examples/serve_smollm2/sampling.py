"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Sampling"]


@dataclass(slots=True)
class Sampling:
    """Greedy at temperature 0; otherwise the nucleus of probability ``top_p``, seeded.

    Parameters
    ----------
    temperature : float
    top_p : float
        0 < top_p <= 1.
    seed : int
    max_tokens : int
    """

    temperature: float = 0.0
    top_p: float = 0.95
    seed: int = 0
    max_tokens: int = 64
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_tokens < 1:
            raise ValueError(f"{self}: temperature >= 0, 0 < top_p <= 1, max_tokens >= 1")
        self._rng = np.random.default_rng(self.seed)

    def choose(self, logits: np.ndarray) -> int:
        """A token for logits [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        scaled = logits[order].astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled[0])
        weights /= weights.sum()
        kept = int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1
        nucleus = weights[:kept] / weights[:kept].sum()
        return int(order[self._rng.choice(len(nucleus), p=nucleus)])
