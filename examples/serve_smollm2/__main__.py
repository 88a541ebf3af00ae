"""Answer a handful of chat requests that share a system prompt."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from rich.console import Console

from .display import serve
from .engine import Engine
from .gguf_file import GGUFFile, find_smollm2
from .model import Model
from .sampling import Sampling
from .tokenizer import ChatTokenizer

SYSTEM = (
    "You are a friendly science teacher. Answer every question in two or three short, clear "
    "sentences that a child of ten understands. Use plain words, give one concrete example from "
    "daily life, and never make up facts."
)
QUESTIONS = (
    "Why is the sky blue?",
    "What is gravity?",
    "How do plants make their food?",
    "Why does ice float on water?",
    "What causes day and night?",
    "How does a magnet work?",
)


def array_module(device: str) -> Any:
    """CuPy where a GPU is to be used, else NumPy."""
    if device != "cpu":
        try:
            import cupy
        except ImportError:
            cupy = None
        if cupy is not None and cupy.is_available():
            return cupy
        if device == "gpu":
            sys.exit("no GPU: CuPy is not installed or finds none; use --device cpu")
    return np


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.serve_smollm2", description=__doc__)
    parser.add_argument(
        "questions", nargs="*", default=QUESTIONS, help="instead of the built-in ones"
    )
    parser.add_argument("--system", default=SYSTEM, help="system prompt that all requests share")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--blocks", type=int, default=256, help="KV cache blocks of 16 tokens")
    parser.add_argument("--token-budget", type=int, default=256, help="most tokens of a step")
    parser.add_argument("--no-sharing", action="store_true", help="compute each prompt on its own")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args()
    console = Console()
    try:
        path = find_smollm2()
    except FileNotFoundError as missing:
        sys.exit(str(missing))
    xp = array_module(options.device)
    with console.status("reading the model"):
        file = GGUFFile(path)
        tokenizer = ChatTokenizer(file)
        model = Model(file, options.blocks, xp=xp)
    console.print(f"SmolLM2-135M-Instruct on {'the CPU (NumPy)' if xp is np else 'the GPU (CuPy)'}")
    engine = Engine(model, tokenizer.end_of_turn, options.token_budget, not options.no_sharing)
    requests = [
        engine.add(
            tokenizer.chat(options.system, question),
            Sampling(options.temperature, seed=seed, max_tokens=options.max_tokens),
        )
        for seed, question in enumerate(options.questions)
    ]
    serve(engine, tokenizer, options.questions, requests)


if __name__ == "__main__":
    main()
