"""Named data patterns: what q, k and v hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PATTERNS", "draw"]

PATTERNS = ("normal", "spiky", "constant", "one_hot", "ascending_v", "outlier", "opposed")
"""
normal
    Independent N(0, 1).
spiky
    N(0, 1) with one element in 64 sixteen times as large: scores far apart.
constant
    q and k all 1, so that every key counts the same; v N(0, 1).
one_hot
    Each token is one channel of size 8: most scores are 0, few are large.
ascending_v
    q is 0 and v[j] = j mod 256: out is the mean of the visible indices.
outlier
    One channel of q and k is 24 times as large in every token, as in real models.
opposed
    |N(0, 1)| for q and its negative for k: every score is below 0.
"""


def draw(
    pattern: str, role: str, rng: np.random.Generator, shape: tuple[int, int, int]
) -> NDArray[np.float32]:
    """Values of ``role`` ("q", "k" or "v") for tokens in order: float32 [tokens, heads, dim]."""
    tokens, heads, dim = shape
    values = rng.standard_normal(shape).astype(np.float32)
    if pattern == "spiky":
        values *= np.where(rng.random(shape) < 1 / 64, np.float32(16), np.float32(1))
    elif pattern == "constant" and role != "v":
        values[...] = 1
    elif pattern == "one_hot":
        channel = rng.integers(0, dim, (tokens, heads, 1))
        values = np.where(np.arange(dim) == channel, np.float32(8), np.float32(0))
    elif pattern == "ascending_v" and role == "q":
        values[...] = 0
    elif pattern == "ascending_v" and role == "v":
        values[...] = (np.arange(tokens) % 256)[:, None, None]
    elif pattern == "outlier" and role != "v":
        values[..., dim // 3] *= 24
    elif pattern == "opposed" and role != "v":
        values = np.abs(values) * np.float32(1 if role == "q" else -1)
    return values
