"""One request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        Why it ended: ``"stop"`` or ``"length"``; empty while it runs.
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

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> int:
        """Tokens whose keys are not in the cache yet."""
        return len(self.tokens) - self.computed
