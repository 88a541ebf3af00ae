"""Answer a handful of chat requests that share a system prompt."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from .config import Config
from .device import choose_device
from .gguf_file import GGUFFile, find_smollm2

SYSTEM = (
    "You are a friendly science teacher. Answer every question in two or three short, clear "
    "sentences that a child of ten understands. Use plain words, give one concrete example from "
    "daily life, and never make up facts."
)
QUESTIONS = (
    "Why is the sky blue?",
    "What is gravity?",
    "How do plants make their food?",
    "What does the heart do?",
    "What causes day and night?",
    "Why do we need sleep?",
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve_smollm2", description=__doc__)
    parser.add_argument(
        "questions", nargs="*", default=QUESTIONS, help="instead of the built-in ones"
    )
    parser.add_argument("--system", default=SYSTEM, help="system prompt that all requests share")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0, help="of the first request; the next +1")
    parser.add_argument("--blocks", type=int, default=256, help="KV cache blocks of 16 tokens")
    parser.add_argument("--token-budget", type=int, default=256, help="most tokens of a step")
    parser.add_argument("--no-sharing", action="store_true", help="share no prompt blocks")
    parser.add_argument("--no-graphs", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args()


def _serve(options: argparse.Namespace) -> None:
    from rich.console import Console

    from .display import Display
    from .engine import Engine
    from .model import Model
    from .sampling import Sampling
    from .tokenizer import ChatTokenizer

    console = Console()
    file = GGUFFile(find_smollm2())
    xp, device = choose_device(options.device, Config.read(file))
    console.print(f"SmolLM2-135M-Instruct on {device}", markup=False, highlight=False)
    with console.status("reading the model"):
        tokenizer = ChatTokenizer(file)
        model = Model(file, xp)
        cache = model.new_cache(options.blocks)
    engine = Engine(
        model,
        cache,
        tokenizer.stop_tokens,
        token_budget=options.token_budget,
        sharing=not options.no_sharing,
        graphs=xp is not np and not options.no_graphs,
    )
    requests = [
        engine.add(
            tokenizer.chat([("system", options.system), ("user", question)]),
            Sampling(options.temperature, options.top_p, options.seed + index, options.max_tokens),
        )
        for index, question in enumerate(options.questions)
    ]
    display = Display(console, tokenizer, engine)
    display.serve(options.questions, requests)
    console.print(display.totals(), markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    options = _options()
    try:
        _serve(options)
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as missing:
        sys.exit(f"{missing}; run: pip install 'cupyflash[examples]'")
    except (FileNotFoundError, RuntimeError, ValueError) as refusal:
        sys.exit(str(refusal))


if __name__ == "__main__":
    main()
