"""Continuous batching: every step mixes decoding requests with chunks of new prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .block_allocator import BlockAllocator, OutOfBlocksError
from .model import Batch, Model
from .request import Request
from .sampling import Sampling

__all__ = ["Engine", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """A request's share of one step: its next ``count`` uncomputed tokens."""

    request: Request
    count: int

    @property
    def gives_token(self) -> bool:
        return self.count == self.request.pending


class Engine:
    """Schedules requests onto a model.

    Parameters
    ----------
    model : Model
    stop_token : int
    token_budget : int
        Most tokens of one step; longer prompts are computed in chunks.
    sharing : bool
        Whether requests with the same beginning share its blocks.
    """

    def __init__(
        self, model: Model, stop_token: int, token_budget: int = 256, sharing: bool = True
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget} must be at least 1")
        self.model, self.stop_token, self.token_budget = model, stop_token, token_budget
        self.allocator = BlockAllocator(model.num_blocks, model.block_size, sharing)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.prompt_tokens = self.decode_tokens = 0

    def add(self, tokens: Sequence[int], sampling: Sampling) -> Request:
        """Queue a request.

        Raises
        ------
        ValueError
            The prompt is empty, or prompt and answer cannot fit in the context or the cache.
        """
        longest = len(tokens) + sampling.max_tokens
        room = min(self.model.config.context, self.model.num_blocks * self.model.block_size)
        if not tokens or longest > room:
            raise ValueError(
                f"{len(tokens)} prompt tokens and up to {sampling.max_tokens} new ones: the "
                f"prompt must not be empty and both must fit in {room} (context and cache)"
            )
        request = Request(list(tokens), sampling)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now and give its blocks back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self._end(request, "abort")

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Request]:
        """Compute one batch; the requests that got a token."""
        work = self._schedule()
        if not work:
            return []
        rows = np.cumsum([w.count for w in work]) - 1
        asks = [w.gives_token for w in work]
        logits = self.model.logits(self._batch(work), rows[asks])
        advanced = []
        for item in work:
            self._count(item)
        for item, row in zip([w for w in work if w.gives_token], logits, strict=True):
            self._advance(item.request, row)
            advanced.append(item.request)
        for item in work:
            if not item.request.finished and item.request not in advanced:
                item.request.computed += item.count
        return advanced

    def _count(self, work: Work) -> None:
        decoding = work.request.computed >= work.request.prompt_length
        self.decode_tokens += work.count if decoding else 0
        self.prompt_tokens += 0 if decoding else work.count

    def _advance(self, request: Request, logits: np.ndarray) -> None:
        request.computed = len(request.tokens)
        token = request.sampling.choose(logits)
        if token == self.stop_token:
            reason = "stop"
        else:
            request.tokens.append(token)
            reason = "length" if len(request.generated) >= request.sampling.max_tokens else ""
        if reason:
            self.running.remove(request)
            self._end(request, reason)

    def _end(self, request: Request, reason: str) -> None:
        request.finished = reason
        self.allocator.release(request.blocks)
        request.blocks = []

    def _schedule(self) -> list[Work]:
        """Running requests first, oldest first; then new ones while blocks and budget last."""
        budget, work = self.token_budget, []
        for request in list(self.running):
            if request not in self.running or budget == 0:  # preempted by an older one
                continue
            count = min(request.pending, budget)
            if self._grow_or_preempt(request, count):
                work.append(self._take(request, count))
                budget -= count
        while self.waiting and budget:
            request = self.waiting[0]
            request.blocks = self.allocator.share_prefix(request.tokens)
            request.computed = len(request.blocks) * self.allocator.block_size
            count = min(request.pending, budget)
            if not self._grow(request, count):
                self.allocator.release(request.blocks)
                request.blocks, request.computed = [], 0
                break
            self.running.append(self.waiting.popleft())
            work.append(self._take(request, count))
            budget -= count
        return work

    def _take(self, request: Request, count: int) -> Work:
        size = self.allocator.block_size
        end = request.computed + count
        self.allocator.publish(
            request.blocks, request.tokens, request.computed // size, end // size
        )
        return Work(request, count)

    def _grow(self, request: Request, count: int) -> bool:
        """Blocks for the next ``count`` tokens; those already taken stay with the request."""
        needed = -(-(request.computed + count) // self.allocator.block_size)
        try:
            while len(request.blocks) < needed:
                request.blocks.append(self.allocator.allocate())
        except OutOfBlocksError:
            return False
        return True

    def _grow_or_preempt(self, request: Request, count: int) -> bool:
        """Take blocks from the youngest requests if need be; False if it gave up its own."""
        while not self._grow(request, count):
            victim = self.running.pop()
            self.allocator.release(victim.blocks)
            victim.blocks, victim.computed = [], 0
            victim.preempted += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _batch(self, work: list[Work]) -> Batch:
        size = self.allocator.block_size
        ends = [w.request.computed + w.count for w in work]
        table = np.zeros((len(work), -(-max(ends) // size)), np.int32)
        tokens, positions, slots = [], [], []
        for row, item, end in zip(table, work, ends, strict=True):
            request = item.request
            row[: len(request.blocks)] = request.blocks[: len(row)]
            place = np.arange(request.computed, end)
            tokens += request.tokens[request.computed : end]
            positions.append(place)
            slots.append(row[place // size].astype(np.int64) * size + place % size)
        return Batch(
            np.asarray(tokens),
            np.concatenate(positions),
            np.concatenate(slots),
            np.cumsum([0, *(w.count for w in work)], dtype=np.int32),
            np.asarray(ends, np.int32),
            table,
        )
