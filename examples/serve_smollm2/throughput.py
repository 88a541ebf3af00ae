"""Tokens per second, prompts and answers apart."""

from __future__ import annotations

from dataclasses import dataclass

from .step import Step

__all__ = ["Throughput"]


@dataclass(slots=True)
class Throughput:
    """Sums over steps. A step that computes prompt tokens counts as prefill, decodes in it too."""

    prompt_tokens: int = 0
    decode_tokens: int = 0
    answer_tokens: int = 0
    prefill_step_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_step_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, step: Step, seconds: float) -> None:
        computed = step.prompt_tokens + step.decode_tokens
        self.prompt_tokens += step.prompt_tokens
        self.decode_tokens += step.decode_tokens
        self.answer_tokens += len(step.tokens)
        if step.prompt_tokens:
            self.prefill_step_tokens += computed
            self.prefill_seconds += seconds
        else:
            self.decode_step_tokens += computed
            self.decode_seconds += seconds

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of the steps with prompt tokens."""
        return self.prefill_step_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens per second, all requests together, of the steps without."""
        return self.decode_step_tokens / max(self.decode_seconds, 1e-9)
