"""Continuous batching: every step mixes decoding requests with chunks of new prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from .block_allocator import BlockAllocator
from .kv_cache import KVCache
from .model import Model
from .request import Request
from .sampling import Sampling
from .step import Step, Work, make_batch

__all__ = ["Engine"]


class Engine:
    """Schedules requests onto a model, first come, first served.

    Parameters
    ----------
    model : Model
    cache : KVCache
        Of the same model; the engine is its only user.
    stop_tokens : collection of int
    token_budget : int
        Most tokens of one step; longer prompts are computed in chunks.
    max_requests : int
        Most requests of one step.
    sharing : bool
        Whether requests with the same beginning share its blocks.
    graphs : bool
        Whether decode steps are replayed as CUDA graphs; needs a GPU.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        stop_tokens: Collection[int],
        token_budget: int = 256,
        max_requests: int = 64,
        sharing: bool = True,
        graphs: bool = False,
    ) -> None:
        if token_budget < 1 or max_requests < 1:
            raise ValueError(
                f"token_budget={token_budget}, max_requests={max_requests} must be at least 1"
            )
        self.model, self.cache, self.stop_tokens = model, cache, frozenset(stop_tokens)
        self.token_budget, self.max_requests = token_budget, max_requests
        self.sharing = sharing
        self.capacity = min(model.config.context, cache.num_blocks * cache.block_size)
        self.allocator = BlockAllocator(cache.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self._max_blocks = -(-self.capacity // cache.block_size)
        self.run_batch = model.runner(cache, token_budget, max_requests, self._max_blocks, graphs)

    def add(self, tokens: Sequence[int], sampling: Sampling) -> Request:
        """Queue a request.

        Raises
        ------
        ValueError
            The prompt is empty, or prompt and answer cannot fit in the context and the cache.
        """
        if not tokens:
            raise ValueError("the prompt has no tokens; it needs at least one")
        # The last token generated is never computed, so it needs no room.
        longest = len(tokens) + sampling.max_tokens - 1
        if longest > self.capacity:
            room = self.capacity - len(tokens) + 1
            nearest = f"max_tokens <= {room}" if room > 0 else "a shorter prompt or more blocks"
            raise ValueError(
                f"{len(tokens)} prompt tokens and max_tokens={sampling.max_tokens} do not fit: "
                f"context {self.model.config.context}, cache {self.cache.num_blocks} blocks of "
                f"{self.cache.block_size} tokens; use {nearest}"
            )
        request = Request(list(tokens), sampling)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now and give its blocks back; no effect on a finished one.

        Raises
        ------
        ValueError
            The request is not of this engine.
        """
        if request.finished:
            return
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError("the request was not added to this engine")
        self._end(request, "abort")

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def run(self) -> Iterator[Step]:
        """Steps until every request is done."""
        while self.busy:
            yield self.step()

    def step(self) -> Step:
        """Compute one batch. If that fails, its requests go back to the queue."""
        published: list[int] = []
        work = self._schedule(published)
        if not work:
            return Step(0, 0, [])
        try:
            batch = make_batch(work, self.cache.block_size, self._max_blocks)
            logits = self.run_batch(batch)
        except BaseException:
            self.allocator.withdraw(published)  # their keys may not have been written
            for item in reversed(work):
                self._requeue(item.request)
            raise
        prompt = sum(item.prompt_tokens for item in work)
        decode = sum(item.count for item in work) - prompt
        rows = iter(logits)
        asking = [item.request for item in work if item.gives_token]
        for item in work:
            item.request.computed += item.count
        return Step(prompt, decode, [(r, self._advance(r, next(rows))) for r in asking])

    def _advance(self, request: Request, logits: np.ndarray) -> int:
        token = request.choose(logits)
        if token in self.stop_tokens:
            reason = "stop"
        else:
            request.tokens.append(token)
            reason = "length" if len(request.generated) >= request.sampling.max_tokens else ""
        if reason:
            self.running.remove(request)
            self._end(request, reason)
        return token

    def _end(self, request: Request, reason: str) -> None:
        request.finished = reason
        self.allocator.release(request.blocks)
        request.blocks = []

    def _schedule(self, published: list[int]) -> list[Work]:
        """Running requests first, oldest first; then new ones while there is room."""
        budget, work = self.token_budget, []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = min(request.pending, budget)
            while not self._grow(request, count):
                # The youngest gives way, so the oldest always finishes.
                victim = self.running[-1]
                victim.preempted += 1
                self._requeue(victim)
                if victim is request:
                    break
            else:
                work.append(self._take(request, count, published))
                budget -= count
        while self.waiting and budget and len(self.running) < self.max_requests:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.running.append(self.waiting.popleft())
            count = min(request.pending, budget)
            work.append(self._take(request, count, published))
            budget -= count
        return work

    def _admit(self, request: Request) -> bool:
        """Known blocks of its beginning, and new ones for the rest; False if they do not fit."""
        size = self.cache.block_size
        # One token at least is computed: its logits are wanted.
        stop = (len(request.tokens) - 1) // size if self.sharing else 0
        found = self.allocator.find(request.digests(size, stop))
        missing = -(-len(request.tokens) // size) - len(found)
        if missing + self.allocator.num_idle(found) > self.allocator.num_free:
            return False
        self.allocator.share(found)
        request.blocks = [*found, *(self.allocator.allocate() for _ in range(missing))]
        request.computed = len(found) * size
        return True

    def _grow(self, request: Request, count: int) -> bool:
        """Blocks for the next ``count`` tokens, or False and no change."""
        needed = -(-(request.computed + count) // self.cache.block_size) - len(request.blocks)
        if needed > self.allocator.num_free:
            return False
        request.blocks += [self.allocator.allocate() for _ in range(needed)]
        return True

    def _take(self, request: Request, count: int, published: list[int]) -> Work:
        """Its share of the step; blocks that this fills can be shared from the same step on."""
        size = self.cache.block_size
        if self.sharing:
            stop = (request.computed + count) // size
            digests = list(request.digests(size, stop))
            for index in range(request.computed // size, stop):
                if self.allocator.publish(request.blocks[index], digests[index]):
                    published.append(request.blocks[index])
        return Work(request, count)

    def _requeue(self, request: Request) -> None:
        """Take a running request's blocks; it is computed again when it is its turn."""
        self.running.remove(request)
        self.allocator.release(request.blocks)
        request.blocks, request.computed = [], 0
        self.waiting.appendleft(request)
