"""The numbered examples run and say what they should."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("01_paged_attention.py", ["prompts of [5, 40, 17] tokens", "step 3: [9, 44, 21] keys"]),
        ("02_property_test.py", ["within the bound", "Causal mask off by one", "request 0"]),
        ("03_backend_engine.py", ["decode 1: 40 tokens, 256 shared keys read once"]),
        ("05_cuda_graphs.py", ["equal the"]),
        ("07_latent_attention.py", ["absorbed and expanded agree", "1152 bytes a token"]),
    ],
)
def test_example(name, words, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed


def test_standard_attention_holds_the_scores_and_ours_does_not(tmp_path):
    module = runpy.run_path(str(EXAMPLES / "06_standard_attention.py"))
    table, picture = tmp_path / "table.json", tmp_path / "table.png"
    rows = module["main"](["--json", str(table), "--plot", str(picture)])
    assert len(json.loads(table.read_text())) == len(rows) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    for row in rows:
        assert row.standard_bytes > row.score_bytes
        # float32 on both sides: sums of 1024 products in another order.
        assert row.largest_difference < 1e-5
    long = rows[1]
    assert long.flash_bytes < long.standard_bytes
    assert long.standard_traffic == 8 * 4 * 4 * 1024**2 + 4 * 1024 * 4 * 128 * 4


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_an_example_have_the_answer_of_one(ranks):
    """In a process of its own: it starts its ranks from its own file."""
    command = [sys.executable, EXAMPLES / "08_context_parallel.py", "--ranks", str(ranks)]
    done = subprocess.run(
        [*command, "--device", "cpu"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert first == f"{ranks} ranks, NumPy arrays, ProcessCommunicator"
    assert len(steps) == 4
    for step in steps:
        assert float(step.rpartition(" ")[2]) < 2e-6  # float32 sums of 44 keys, in other parts


def test_every_numbered_example_is_listed():
    assert sorted(path.name for path in EXAMPLES.glob("[0-9]*.py")) == [
        "01_paged_attention.py",
        "02_property_test.py",
        "03_backend_engine.py",
        "04_minilm_embeddings.py",
        "05_cuda_graphs.py",
        "06_standard_attention.py",
        "07_latent_attention.py",
        "08_context_parallel.py",
    ]
