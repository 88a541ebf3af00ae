"""What the user sees: answers as they grow, and the totals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .engine import Engine
from .request import Request
from .tokenizer import ChatTokenizer

__all__ = ["serve"]


def serve(
    engine: Engine, tokenizer: ChatTokenizer, questions: Sequence[str], requests: Sequence[Request]
) -> None:
    """Run the engine until all requests are done, showing every answer as it grows."""
    console = Console()
    seconds = {"prompt": 0.0, "decode": 0.0}
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while engine.busy:
            start, before = time.perf_counter(), engine.prompt_tokens
            engine.step()
            kind = "prompt" if engine.prompt_tokens > before else "decode"
            seconds[kind] += time.perf_counter() - start
            if console.is_terminal:
                live.update(_answers(tokenizer, questions, requests))
    console.print(_answers(tokenizer, questions, requests))
    console.print(_totals(engine, seconds))


def _answers(
    tokenizer: ChatTokenizer, questions: Sequence[str], requests: Sequence[Request]
) -> Table:
    table = Table(show_lines=True)
    table.add_column("question", ratio=1)
    table.add_column("answer", ratio=2)
    table.add_column("tokens", justify="right")
    for question, request in zip(questions, requests, strict=True):
        answer = tokenizer.decode(request.generated).strip()
        cut = " ..." if request.finished == "length" else ""
        table.add_row(question, answer + cut, str(len(request.generated)))
    return table


def _totals(engine: Engine, seconds: dict[str, float]) -> str:
    reused, size = engine.allocator.reused, engine.allocator.block_size
    saved = reused * engine.model.block_bytes / 1e6
    total = sum(seconds.values())
    tokens = engine.prompt_tokens + engine.decode_tokens
    return (
        f"{engine.prompt_tokens} prompt and {engine.decode_tokens} generated tokens in "
        f"{total:.1f} s: {tokens / max(total, 1e-9):.0f} tokens/s, decode steps alone "
        f"{engine.decode_tokens / max(seconds['decode'], 1e-9):.0f} tokens/s\n"
        f"sharing saved {reused} blocks of {size} tokens: {reused * size} prompt tokens not "
        f"computed again, {saved:.1f} MB of KV cache"
    )
