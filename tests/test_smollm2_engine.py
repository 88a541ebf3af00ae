"""The scheduler of examples/serve_smollm2 with a model that answers from what it reads back.

`Recall` stores each token in the cache and answers with a hash of all tokens that the block table
leads to: a wrong slot, a stale or foreign block, or a lost token changes every later answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.serve_smollm2.batch import Batch
from examples.serve_smollm2.config import Config
from examples.serve_smollm2.engine import Engine
from examples.serve_smollm2.kv_cache import KVCache
from examples.serve_smollm2.request import Request
from examples.serve_smollm2.sampling import Sampling

BLOCK, VOCABULARY, STOP = 4, 3, 0
CONFIG = Config(1, 1, 1, 1, 1, context=64, rope_base=1.0, epsilon=1.0)


def recalled_logits(tokens: np.ndarray) -> np.ndarray:
    digest = hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).digest()
    logits = np.frombuffer(digest[:VOCABULARY], np.uint8) / np.float32(40)
    logits[STOP] -= 2  # answers of some length
    return logits


class Recall:
    """Stands for the model; see the module's text."""

    config = CONFIG

    def __init__(self) -> None:
        self.failures = 0
        self.steps: list[int] = []

    def runner(self, cache: KVCache, *limits: Any) -> Any:
        return lambda batch: self.compute(batch, cache)

    def compute(self, batch: Batch, cache: KVCache) -> np.ndarray:
        if self.failures:
            self.failures -= 1
            raise MemoryError("planted")
        keys = cache.layers[0][0].reshape(-1)
        step = batch.common
        slots = step.slot_mapping
        assert len(set(slots.tolist())) == len(slots) == step.num_actual_tokens
        assert slots.min() >= 0
        keys[slots] = batch.tokens
        self.steps.append(len(batch.tokens))
        rows = {int(row): i for i, row in enumerate(batch.logit_rows)}
        found = np.empty((len(rows), VOCABULARY), np.float32)
        starts = step.query_start_loc
        assert starts[-1] == len(batch.tokens)
        assert int(np.diff(starts).max()) == step.max_query_len
        assert int(step.seq_lens.max()) == step.max_seq_len
        for request, length in enumerate(step.seq_lens):
            first, end = int(starts[request]), int(starts[request + 1])
            assert list(batch.positions[first:end]) == list(range(length - end + first, length))
            places = np.arange(length)
            blocks = step.block_table_tensor[request, places // BLOCK]
            assert blocks.min() >= 0
            seen = keys[blocks * BLOCK + places % BLOCK]
            if end - 1 in rows:
                found[rows[end - 1]] = recalled_logits(seen)
        return found


def alone(prompt: list[int], sampling: Sampling) -> list[int]:
    """What a request answers without an engine."""
    request = Request(list(prompt), sampling)
    while len(request.generated) < sampling.max_tokens:
        token = request.choose(recalled_logits(np.array(request.tokens)))
        if token == STOP:
            break
        request.tokens.append(token)
    return request.generated


def long_answers(prompts: list[list[int]], length: int) -> Sampling:
    """A setting with which no answer stops early."""
    settings = (Sampling(1.0, 1.0, seed, length) for seed in range(1000))
    return next(s for s in settings if all(len(alone(p, s)) == length for p in prompts))


def make_engine(num_blocks: int = 16, **options: Any) -> Engine:
    cache = KVCache(CONFIG, num_blocks, BLOCK, np, np.int64)
    cache.layers[0][0][...] = 99  # unwritten
    return Engine(Recall(), cache, {STOP}, **options)  # type: ignore[arg-type]


def check_books(engine: Engine) -> None:
    """Every reference belongs to a running request."""
    held = [block for request in engine.running for block in request.blocks]
    users = [engine.allocator.users(b) for b in range(engine.cache.num_blocks)]
    assert users == [held.count(b) for b in range(engine.cache.num_blocks)]
    assert engine.allocator.num_free == users.count(0)
    assert not any(request.blocks for request in engine.waiting)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    sampling: Sampling
    abort_after: int | None


_prompt = st.one_of(
    st.lists(st.integers(1, 2), min_size=1, max_size=21),
    st.integers(1, 21).map(lambda n: [1] * n),
)
_sampling = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 12),
)
_arrival = st.builds(Arrival, st.integers(0, 8), _prompt, _sampling, st.none() | st.integers(0, 6))


@given(
    arrivals=st.lists(_arrival, min_size=1, max_size=7),
    num_blocks=st.integers(8, 20),
    token_budget=st.integers(1, 30),
    max_requests=st.integers(1, 6),
    sharing=st.booleans(),
    failing=st.sets(st.integers(0, 12), max_size=2),
)
def test_answers_are_those_of_each_request_alone(
    arrivals: list[Arrival],
    num_blocks: int,
    token_budget: int,
    max_requests: int,
    sharing: bool,
    failing: set[int],
) -> None:
    engine = make_engine(
        num_blocks, token_budget=token_budget, max_requests=max_requests, sharing=sharing
    )
    recall: Any = engine.model
    requests: list[tuple[Arrival, Request]] = []
    step = 0
    while engine.busy or len(requests) < len(arrivals):
        for arrival in (a for a in arrivals if a.step == step):
            requests.append((arrival, engine.add(arrival.prompt, arrival.sampling)))
        for arrival, request in requests:
            if arrival.abort_after is not None and step == arrival.step + arrival.abort_after:
                engine.abort(request)
        if step in failing and engine.busy:
            recall.failures = 1
            with pytest.raises(MemoryError, match="planted"):
                engine.step()
            check_books(engine)
        engine.step()
        check_books(engine)
        step += 1
        assert step < 2000
    assert max(recall.steps, default=0) <= token_budget
    for arrival, request in requests:
        wanted = alone(arrival.prompt, arrival.sampling)
        if request.finished == "abort":
            assert request.generated == wanted[: len(request.generated)]
        else:
            assert request.generated == wanted
    assert engine.allocator.num_free == num_blocks


def test_a_shared_beginning_is_computed_once() -> None:
    engine = make_engine()
    prompts = [[1, 2, 1, 1, 2, 2, 2, 1, tail] for tail in (1, 2, 1)]
    requests = [engine.add(prompt, Sampling(max_tokens=1)) for prompt in prompts]
    first = engine.step()
    assert first.prompt_tokens == 9 + 1 + 1
    assert engine.allocator.shared == 2 * 2
    assert all(request.finished for request in requests)
    late = engine.add(prompts[1], Sampling(max_tokens=1))
    assert engine.step().prompt_tokens == 1
    assert (engine.allocator.shared, engine.allocator.revived) == (4, 2)
    assert late.generated == alone(prompts[1], Sampling(max_tokens=1))


def test_equal_tokens_after_a_different_beginning_are_not_shared() -> None:
    engine = make_engine()
    for prompt in ([1] * 4 + [2] * 5, [2] * 4 + [2] * 5, [1] * 4 + [2] * 5):
        request = engine.add(prompt, Sampling(max_tokens=1))
        engine.step()
        assert request.generated == alone(prompt, Sampling(max_tokens=1))
    assert engine.allocator.revived == 2


def test_a_whole_prompt_in_the_cache_still_gives_its_logits() -> None:
    engine = make_engine()
    for _ in range(2):
        request = engine.add([1] * 8, Sampling(max_tokens=1))
        engine.step()
        assert request.generated == alone([1] * 8, Sampling(max_tokens=1))
    assert engine.allocator.revived == 1


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    engine = make_engine(6, sharing=False)
    prompts = [[2, 1, 1, 2, 1, 1], [1, 2, 2, 1, 2, 2]]
    long = long_answers(prompts, 13)
    requests = [engine.add(prompt, long) for prompt in prompts]
    while engine.busy:
        engine.step()
        check_books(engine)
    assert [r.preempted for r in requests] == [0, 1]
    assert [r.generated for r in requests] == [alone(p, long) for p in prompts]


def test_a_failed_step_is_computed_again_in_order() -> None:
    engine = make_engine(token_budget=12)
    prompts = [[1, 2, 1, 1, 2], [1, 2, 1, 1, 2, 2], [2, 2]]
    requests = [engine.add(prompt, Sampling(max_tokens=2)) for prompt in prompts]
    engine.model.failures = 1  # type: ignore[attr-defined]
    with pytest.raises(MemoryError, match="planted"):
        engine.step()
    assert list(engine.waiting) == requests
    assert engine.allocator.num_free == 16
    assert engine.step().prompt_tokens == 5 + 2 + 2
    while engine.busy:
        engine.step()
    assert [r.generated for r in requests] == [alone(p, Sampling(max_tokens=2)) for p in prompts]


def test_known_blocks_without_a_user_still_cost_a_free_one() -> None:
    engine = make_engine(4)
    engine.add([1] * 8, Sampling(max_tokens=1))
    engine.step()  # leaves two findable blocks behind
    engine.add([2], long_answers([[2]], 3))
    engine.step()
    assert engine.allocator.num_free == 3
    request = engine.add([1] * 13, Sampling(max_tokens=1))  # two known blocks, two new ones
    engine.step()
    assert request in engine.waiting
    while engine.busy:
        engine.step()
    assert engine.allocator.revived == 2
    assert request.generated == alone([1] * 13, Sampling(max_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "needs at least one"),
        ([1] * 20, 14, r"20 prompt tokens and max_tokens=14 do not fit.*use max_tokens <= 13"),
        ([1] * 33, 1, "use a shorter prompt or more blocks"),
    ],
    ids=["empty", "answer", "prompt"],
)
def test_requests_that_can_never_fit_are_refused(
    prompt: list[int], max_tokens: int, message: str
) -> None:
    engine = make_engine(8)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, Sampling(max_tokens=max_tokens))
    assert not engine.busy


def test_the_longest_request_that_fits_is_served() -> None:
    engine = make_engine(8, token_budget=5)
    request = engine.add([1] * 20, Sampling(max_tokens=13))
    while engine.busy:
        engine.step()
    assert request.generated == alone([1] * 20, Sampling(max_tokens=13))


def test_abort_of_finished_and_foreign_requests() -> None:
    engine = make_engine()
    request = engine.add([1], Sampling(max_tokens=1))
    with pytest.raises(ValueError, match="not added to this engine"):
        make_engine().abort(request)
    engine.step()
    finished = request.finished
    engine.abort(request)
    assert request.finished == finished != ""
    engine.abort(waiting := engine.add([1], Sampling()))
    assert waiting.finished == "abort"
    assert not engine.busy


@pytest.mark.parametrize(
    "options", [{"token_budget": 0}, {"max_requests": 0}, {"num_blocks": 0}], ids=str
)
def test_an_engine_needs_room_to_work(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        make_engine(**options)
