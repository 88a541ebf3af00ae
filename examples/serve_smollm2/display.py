"""What the user sees: answers as they grow, and the totals."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .engine import Engine
from .request import Request
from .throughput import Throughput
from .tokenizer import ChatTokenizer

__all__ = ["Display"]

_ENDINGS = {"length": " ...", "abort": " [stopped]"}


class Display:
    """Runs an engine and shows every answer as it grows.

    On a terminal a table that is redrawn; elsewhere each answer once, when it is complete.
    """

    def __init__(self, console: Console, tokenizer: ChatTokenizer, engine: Engine) -> None:
        self.console, self.tokenizer, self.engine = console, tokenizer, engine
        self.throughput = Throughput()

    def serve(self, questions: Sequence[str], requests: Sequence[Request]) -> None:
        """Run the engine until it has nothing left to do."""
        if not self.console.is_terminal:
            self._serve_plain(questions, requests)
            return
        with Live(console=self.console, refresh_per_second=8, transient=True) as live:
            while self.engine.busy:
                self._step()
                live.update(Group(self._table(questions, requests), self._status(requests)))
        self.console.print(self._table(questions, requests))

    def _serve_plain(self, questions: Sequence[str], requests: Sequence[Request]) -> None:
        waiting = list(zip(questions, requests, strict=True))
        while self.engine.busy:
            self._step()
            for pair in [p for p in waiting if p[1].finished]:
                waiting.remove(pair)
                done = f"[{len(requests) - len(waiting)}/{len(requests)}]"
                print(f"{done} {pair[0]}\n    {self._answer(pair[1])}", flush=True)

    def _step(self) -> None:
        start = time.perf_counter()
        step = self.engine.step()
        self.throughput.add(step, time.perf_counter() - start)

    def _answer(self, request: Request) -> str:
        text = self.tokenizer.decode(request.generated).strip()
        if not request.finished:
            text = text.rstrip("\ufffd")  # half a character, until its other bytes come
        return text + _ENDINGS.get(request.finished, "")

    def _table(self, questions: Sequence[str], requests: Sequence[Request]) -> Table:
        table = Table(show_lines=True, expand=True)
        table.add_column("question", ratio=1)
        table.add_column("answer", ratio=3)
        table.add_column("tokens", justify="right")
        for question, request in zip(questions, requests, strict=True):
            answer = Text(self._answer(request))  # Text: brackets in it are no markup
            table.add_row(Text(question), answer, str(len(request.generated)))
        return table

    def _status(self, requests: Sequence[Request]) -> Text:
        done = sum(bool(r.finished) for r in requests)
        allocator, t = self.engine.allocator, self.throughput
        used = allocator.num_blocks - allocator.num_free
        return Text(
            f"{done} of {len(requests)} answered, {len(self.engine.running)} running, "
            f"{used} of {allocator.num_blocks} blocks in use, {t.decode_rate:.0f} tokens/s"
        )

    def totals(self) -> str:
        """Speed, and what sharing saved."""
        t, allocator, cache = self.throughput, self.engine.allocator, self.engine.cache
        taken = allocator.shared + allocator.revived
        return (
            f"{t.prompt_tokens} prompt tokens computed, {t.answer_tokens} generated in "
            f"{t.seconds:.1f} s: prefill {t.prefill_rate:.0f} tokens/s, "
            f"decode {t.decode_rate:.0f} tokens/s\n"
            f"sharing: {allocator.shared} blocks of KV cache saved "
            f"({allocator.shared * cache.block_bytes / 1e6:.1f} MB), "
            f"{taken * cache.block_size} prompt tokens not computed again"
        )
