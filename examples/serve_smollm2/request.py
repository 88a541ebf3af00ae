"""One request on its way through the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .block_allocator import chain_digest
from .sampling import Sampling

__all__ = ["Request"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what has been generated, and the cache blocks that hold its keys.

    Attributes
    ----------
    tokens : list of int
        Prompt and generated tokens.
    prompt_length : int
    computed : int
        Tokens whose keys are in the cache.
    blocks : list of int
    finished : str
        Why it ended: ``"stop"``, ``"length"`` or ``"abort"``; empty before.
    preempted : int
        How often it lost its blocks to older requests.
    """

    tokens: list[int]
    sampling: Sampling
    prompt_length: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    finished: str = ""
    preempted: int = 0
    _digests: list[bytes] = field(default_factory=list, repr=False)
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self._rng = np.random.default_rng(self.sampling.seed)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> int:
        """Tokens whose keys are not in the cache yet."""
        return len(self.tokens) - self.computed

    def digests(self, block_size: int, stop: int) -> Iterator[bytes]:
        """Digests of the full blocks in front of block ``stop``."""
        for index in range(stop):
            if index == len(self._digests):
                before = self._digests[-1] if index else b""
                block = self.tokens[index * block_size : (index + 1) * block_size]
                self._digests.append(chain_digest(before, block))
            yield self._digests[index]

    def choose(self, logits: np.ndarray) -> int:
        """Its next token, for logits [vocabulary]."""
        return self.sampling.choose(logits, self._rng)
