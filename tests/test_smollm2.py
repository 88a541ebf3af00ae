"""examples/serve_smollm2 on the real model: against another implementation, and against itself.

The kept values come from transformers on torch, which read the same GGUF file once; they say how
far that implementation's own float32 logits are from its float64 ones (1e-4), and how far the
float16 arithmetic of the GPU is (0.12, worked out with NumPy).
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cupyflash.backend import CommonAttentionMetadata
from examples.serve_smollm2.batch import Batch
from examples.serve_smollm2.config import Config
from examples.serve_smollm2.device import choose_device
from examples.serve_smollm2.display import Display
from examples.serve_smollm2.engine import Engine
from examples.serve_smollm2.gguf_file import GGUFFile, find_smollm2
from examples.serve_smollm2.model import Model
from examples.serve_smollm2.runner import graph_sizes
from examples.serve_smollm2.sampling import Sampling
from examples.serve_smollm2.tokenizer import ChatTokenizer

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())
# Ten times the rounding noise of float32 in this model, so that another order of sums passes;
# the smallest planted bug below must move a logit by ten times as much.
FLOAT32_BOUND = 1e-3
SYSTEM = "You answer in one short sentence, with plain words, and never make up any facts at all."
QUESTIONS = ("Why is the sky blue?", "What is gravity?", "Who wrote Hamlet?")


@pytest.fixture(scope="module")
def file() -> GGUFFile:
    return GGUFFile(find_smollm2())


@pytest.fixture(scope="module")
def model(file: GGUFFile) -> Model:
    return Model(file)


@pytest.fixture(scope="module")
def tokenizer(file: GGUFFile) -> ChatTokenizer:
    return ChatTokenizer(file)


@dataclass
class Served:
    tokens: list[list[int]]
    engine: Engine
    prompt_tokens: int


def serve(
    model: Model,
    tokenizer: ChatTokenizer,
    sampling: Sampling,
    *,
    num_blocks: int = 64,
    abort: int | None = None,
    **options: Any,
) -> Served:
    engine = Engine(model, model.new_cache(num_blocks), tokenizer.stop_tokens, **options)
    requests = [
        engine.add(tokenizer.chat([("system", SYSTEM), ("user", question)]), sampling)
        for question in QUESTIONS
    ]
    computed = 0
    for index, step in enumerate(engine.run()):
        computed += step.prompt_tokens
        if index == 2 and abort is not None:
            engine.abort(requests[abort])
    return Served([r.generated for r in requests], engine, computed)


def reference_logits(model: Model, chunks: int = 1) -> np.ndarray:
    """Logits of the kept prompt at all positions, computed in equal chunks."""
    prompt, cache = np.array(REFERENCE["prompt"]), model.new_cache(8)
    run = model.runner(cache, len(prompt), len(prompt), 4, graphs=False)
    size, found, table = -(-len(prompt) // chunks), [], np.array([[5, 0, 7, 2]], np.int32)
    for first in range(0, len(prompt), size):
        positions = np.arange(first, min(first + size, len(prompt)))
        count, end = len(positions), int(positions[-1]) + 1
        common = CommonAttentionMetadata(
            query_start_loc=np.array([0, count], np.int32),
            seq_lens=np.array([end], np.int32),
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=end,
            block_table_tensor=table,
            slot_mapping=table[0].astype(np.int64)[positions // 16] * 16 + positions % 16,
        )
        found.append(run(Batch(prompt[positions], positions, np.arange(count), common)))
    return np.concatenate(found)


def reference_error(logits: np.ndarray) -> float:
    worst = 0.0
    for kept in REFERENCE["positions"]:
        row = logits[kept["position"]]
        worst = max(worst, float(np.abs(row[kept["argsort"]] - kept["top"]).max()))
        worst = max(worst, float(np.abs(row[:: REFERENCE["stride"]] - kept["slice"]).max()))
    return worst


@pytest.mark.parametrize("chunks", [1, 3])
def test_logits_match_the_independent_implementation(model: Model, chunks: int) -> None:
    assert reference_error(reference_logits(model, chunks)) <= FLOAT32_BOUND


def test_the_comparison_notices_small_mistakes(model: Model, monkeypatch: Any) -> None:
    for changes in ({"epsilon": 2e-5}, {"rope_base": 101000.0}):
        planted = Model.__new__(Model)
        planted.__dict__.update(model.__dict__)
        planted.config = replace(model.config, **changes)
        if "rope_base" in changes:
            pairs = np.arange(0, 64, 2) / 64
            angles = np.arange(64)[:, None] / changes["rope_base"] ** pairs
            planted._cos, planted._sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
        assert reference_error(reference_logits(planted)) > 10 * FLOAT32_BOUND, changes


@pytest.fixture(scope="module")
def gpu_model(file: GGUFFile) -> Model:
    xp, _ = choose_device("gpu", Config.read(file))
    return Model(file, xp)


@pytest.mark.gpu
def test_logits_on_the_gpu_match_within_float16(gpu_model: Model) -> None:
    assert reference_error(reference_logits(gpu_model)) <= 2 * REFERENCE["float16_error"]


@pytest.mark.gpu
def test_answers_with_graphs_are_those_without(gpu_model: Model, tokenizer: ChatTokenizer) -> None:
    greedy = Sampling(max_tokens=24)
    plain = serve(gpu_model, tokenizer, greedy)
    graphs = serve(gpu_model, tokenizer, greedy, graphs=True, max_requests=8)
    assert graphs.tokens == plain.tokens
    assert plain.engine.run_batch.replays == 0
    assert graphs.engine.run_batch.replays >= 20


@pytest.mark.gpu
def test_a_replay_has_the_bits_of_the_same_step_without(gpu_model: Model) -> None:
    """Batches of 1 to 20 requests, in turns, over a cache of noise."""
    rng, cache = np.random.default_rng(0), gpu_model.new_cache(80)
    for layer in cache.layers:
        layer[...] = gpu_model.xp.asarray(rng.standard_normal(layer.shape), np.float16)
    run = gpu_model.runner(cache, 64, 20, 4, graphs=True)
    for requests in (20, 1, 7, 16, 3, 20, 2):
        for context in (0, 33):
            batch = decode_batch(rng, requests, context)
            size = next(n for n in (1, 2, 4, 8, 16, 20) if n >= requests)
            with run.on_stream():
                right = run.eager(batch.padded(size, 4 * 16)).get()[:requests]
            assert run(batch).tobytes() == right.tobytes()
    assert run.replays == 14


def decode_batch(rng: np.random.Generator, requests: int, context: int) -> Batch:
    """The token behind ``context`` others of each request; request i has four blocks from 4 i."""
    table = np.arange(4 * requests, dtype=np.int32).reshape(requests, 4)
    starts = np.arange(requests + 1, dtype=np.int32)
    positions = np.full(requests, context)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        seq_lens=(positions + 1).astype(np.int32),
        num_reqs=requests,
        num_actual_tokens=requests,
        max_query_len=1,
        max_seq_len=context + 1,
        block_table_tensor=table,
        slot_mapping=table[:, context // 16].astype(np.int64) * 16 + context % 16,
    )
    return Batch(rng.integers(3, 1000, requests), positions, np.arange(requests), common)


@pytest.mark.parametrize("requests", [1, 3, 5])
def test_padding_changes_no_logit(model: Model, requests: int) -> None:
    rng, cache = np.random.default_rng(1), model.new_cache(32)
    run = model.runner(cache, 16, 8, 4, graphs=False)
    for layer in cache.layers:
        layer[...] = rng.standard_normal(layer.shape)
    batch = decode_batch(rng, requests, 40)
    with np.errstate(all="ignore"):  # padding rows hold whatever their memory held
        padded = run(batch.padded(8, 64))[:requests]
    # BLAS sums in another order for another number of rows.
    np.testing.assert_allclose(padded, run(batch), atol=FLOAT32_BOUND, rtol=0)


def test_graph_sizes_reach_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]


def test_graphs_need_a_gpu(model: Model, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ValueError, match="graphs=True needs a GPU"):
        serve(model, tokenizer, Sampling(), graphs=True)


def test_greedy_answer_is_the_reference_one(model: Model, tokenizer: ChatTokenizer) -> None:
    wanted = REFERENCE["greedy"]
    engine = Engine(model, model.new_cache(16), tokenizer.stop_tokens)
    prompt = tokenizer.chat(REFERENCE["chats"][0]["messages"])
    request = engine.add(prompt, Sampling(max_tokens=len(wanted)))
    for _ in engine.run():
        pass
    assert request.generated == wanted
    assert "Rayleigh scattering" in tokenizer.decode(request.generated)


def test_tokens_do_not_depend_on_sharing_chunks_or_room(
    model: Model, tokenizer: ChatTokenizer
) -> None:
    greedy = Sampling(max_tokens=8)
    plain = serve(model, tokenizer, greedy, sharing=False)
    assert all(len(tokens) > 3 for tokens in plain.tokens)
    assert plain.engine.allocator.shared == 0
    shared = serve(model, tokenizer, greedy)
    assert shared.tokens == plain.tokens
    assert shared.engine.allocator.shared >= 2
    assert shared.prompt_tokens == plain.prompt_tokens - 16 * shared.engine.allocator.shared
    assert serve(model, tokenizer, greedy, token_budget=17).tokens == plain.tokens
    tight = serve(model, tokenizer, greedy, num_blocks=5, sharing=False)
    assert tight.tokens == plain.tokens
    assert tight.engine.allocator.num_free == 5


def test_sampling_follows_the_seed_alone(model: Model, tokenizer: ChatTokenizer) -> None:
    warm = Sampling(temperature=1.0, top_p=0.9, seed=7, max_tokens=6)
    first = serve(model, tokenizer, warm)
    assert serve(model, tokenizer, warm, token_budget=23, sharing=False).tokens == first.tokens
    aborted = serve(model, tokenizer, warm, abort=0)
    assert aborted.tokens[1:] == first.tokens[1:]
    assert len(aborted.tokens[0]) < len(first.tokens[0])
    assert aborted.engine.allocator.num_free == 64
    assert serve(model, tokenizer, replace(warm, seed=8)).tokens != first.tokens


def test_stop_tokens_end_an_answer(model: Model, tokenizer: ChatTokenizer) -> None:
    engine = Engine(model, model.new_cache(16), tokenizer.stop_tokens)
    prompt = tokenizer.chat([("system", "Answer with one word."), ("user", "Say yes.")])
    request = engine.add(prompt, Sampling(max_tokens=60))
    for _ in engine.run():
        pass
    assert request.finished == "stop"
    assert not tokenizer.stop_tokens & set(request.generated)


def test_what_is_shown_off_a_terminal(model: Model, tokenizer: ChatTokenizer, capsys: Any) -> None:
    engine = Engine(model, model.new_cache(16), tokenizer.stop_tokens)
    question = "What is [bold]2[/bold] + 2?"
    request = engine.add(tokenizer.chat([("user", question)]), Sampling(max_tokens=3))
    display = Display(Console(file=io.StringIO()), tokenizer, engine)
    display.serve([question], [request])
    shown = capsys.readouterr().out
    assert f"[1/1] {question}" in shown
    assert tokenizer.decode(request.generated).strip() in shown
    assert f"{request.prompt_length} prompt tokens computed, 3 generated" in display.totals()


def test_what_is_shown_on_a_terminal(model: Model, tokenizer: ChatTokenizer) -> None:
    engine = Engine(model, model.new_cache(16), tokenizer.stop_tokens)
    request = engine.add(tokenizer.chat([("user", "[i]?")]), Sampling(max_tokens=3))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    Display(console, tokenizer, engine).serve(["[i]?"], [request])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[i]?" in shown
    assert tokenizer.decode(request.generated).split()[0] in shown
