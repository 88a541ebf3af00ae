"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Greedy at temperature 0; otherwise the nucleus of probability ``top_p``.

    Parameters
    ----------
    temperature : float
    top_p : float
        0 < top_p <= 1.
    seed : int
        Of the request's own random numbers: its answer does not depend on its neighbours.
    max_tokens : int
    """

    temperature: float = 0.0
    top_p: float = 0.95
    seed: int = 0
    max_tokens: int = 64

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        if not (0 <= self.temperature < np.inf):
            raise ValueError(f"temperature={self.temperature} must be >= 0 and finite (0 = greedy)")
        if not (0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps every token")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be >= 0")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")

    def nucleus(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The fewest likeliest tokens that reach ``top_p``, and their probabilities."""
        order = np.argsort(-logits, kind="stable")
        scaled = (logits[order].astype(np.float64) - logits[order[0]]) / self.temperature
        weights = np.exp(scaled)
        weights /= weights.sum()
        kept = min(int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1, len(order))
        return order[:kept], weights[:kept] / weights[:kept].sum()

    def choose(self, logits: np.ndarray, rng: np.random.Generator) -> int:
        """A token for logits [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        tokens, weights = self.nucleus(logits)
        return int(rng.choice(tokens, p=weights))
