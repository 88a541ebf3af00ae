"""``check``: the kernels of this release against the float64 oracle, on this GPU or on NumPy."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash
from cupyflash.fa_version import current_capability
from cupyflash.runtime.cupy_import import load_cupy
from cupyflash.testing import DTYPES, Case, expect_merge, write_oracle

from .call_options import gpu_of
from .compile_many import compile_ahead
from .margin import margin, plot_margins
from .outputs import check_outputs
from .recorded_call import record
from .terminal import CommandError, print_table, progress

__all__ = ["add", "checks", "run"]

_LENGTHS = {
    "decode": ((1, 300), (1, 0), (1, 77), (1, -1), (1, 1029)),
    "chunked": ((5, 60), (1, 200), (33, 90)),
    "prefill": ((150, 0), (64, 0), (0, 9), (17, -5)),
}
_FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window_size": (40, 0), "sink": True},
    {"softcap": 20.0, "alibi": "head"},
)


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("check", help="a self-test of about a minute")
    parser.add_argument(
        "--on", choices=("auto", "gpu", "numpy"), default="auto", help="auto = the GPU if any"
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the cases")
    parser.add_argument("--json", type=Path, help="write the error of every attention case here")
    parser.add_argument("--plot", type=Path, help="draw the errors here (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run every check; 1 if one fails."""
    xp = _module(options.on)
    check_outputs(options.json, plot=options.plot)
    listed = list(checks(xp))[:: 5 if options.quick else 1]
    failures, margins, start = [], [], time.monotonic()
    if xp is not np:
        _compile_ahead(list(_cases(numpy=False))[:: 5 if options.quick else 1])
    for name, check in progress(listed, len(listed), "check"):
        try:
            found = check()
        except Exception as error:  # the next ones may say more of what is wrong
            failures.append(f"{name}: {type(error).__name__}: {error}")
        else:
            margins += [] if found is None else [found]
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    where = "NumPy arrays" if xp is np else "the GPU"
    seconds = time.monotonic() - start
    print_table(("attention", "cases", "error / bound: mean", "largest"), _summary(margins))
    print(
        f"{len(listed) - len(failures)} of {len(listed)} checks passed on {where} in "
        f"{seconds:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps(margins, indent=1))
    if options.plot:
        plot_margins(options.plot, f"cupyflash {cupyflash.__version__} on {where}", margins)
    return 1 if failures else 0


def _compile_ahead(cases: list[Case]) -> None:
    """What the cases launch; a failure comes back with its case."""
    info = gpu_of("here")
    assert info is not None
    variants = {
        launch.plan.variant
        for case in cases
        for launch in record(info, case.make(np).args).launches
    }
    compile_ahead(list(variants))


def _summary(margins: list[dict[str, Any]]) -> list[list[str]]:
    """One row for each pair of types."""
    shares: dict[str, list[float]] = {}
    for found in margins:
        shares.setdefault(found["types"], []).append(found["share"])
    return [
        [types, str(len(values)), f"{sum(values) / len(values):.2f}", f"{max(values):.2f}"]
        for types, values in shares.items()
    ]


def _module(on: str) -> Any:
    capability, without = current_capability()
    if on == "gpu" and capability is None:
        raise CommandError(f"--on gpu: {without}")
    return np if on == "numpy" or capability is None else load_cupy()


def checks(xp: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    """Name and test of everything that is checked, on the arrays of a module.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.

    Yields
    ------
    (str, callable)
        The callable raises where a result is outside of its bound; for attention it returns what
        `margin.margin` does.
    """
    for case in _cases(numpy=xp is np):
        yield str(case), partial(_check_attention, xp, case)
    for kind in ("fp16", "bf16"):
        yield f"merge_attn_states {kind}", partial(_check_merge, xp, kind)
        for cache in ("auto", "fp8_e4m3", "fp8_e5m2"):
            name = f"reshape_and_cache_flash {kind} {cache}"
            yield name, partial(_check_write, xp, kind, cache)


def _cases(numpy: bool) -> Iterator[Case]:
    types = [("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "e4m3"), ("e4m3", "e4m3")]
    types += [("fp32", "fp32")] if numpy else []
    seed = 0
    for q_type, kv_type in types:
        for lengths in _LENGTHS.values():
            for head_dim in (64, 80, 128, 256):
                for features in _FEATURES:
                    seed += 1
                    yield Case(
                        lengths=lengths,
                        num_heads_kv=2,
                        group_size=(1, 3, 4)[seed % 3],
                        head_dim=head_dim,
                        page_size=(16, None, 48)[seed % 3],
                        causal=seed % 2 == 0,
                        q_type=q_type,
                        kv_type=kv_type,
                        descale=kv_type == "e4m3" and seed % 2 == 1,
                        layout=("NHD", "HND", "strided")[seed // 3 % 3],
                        pattern=("normal", "spiky")[seed % 2],
                        seed=seed,
                        **features,
                    )


def _check_attention(xp: Any, case: Case) -> dict[str, Any]:
    return margin(case, xp, cupyflash.flash_attn_varlen_func)


def _check_merge(xp: Any, kind: str) -> None:
    rng = np.random.default_rng(1)
    states = []
    for _ in range(2):
        lse = rng.uniform(-5, 5, (4, 37)).astype(np.float32)
        lse[rng.random(lse.shape) < 0.2] = -np.inf
        states.append((rng.standard_normal((37, 4, 64)).astype(DTYPES[kind]), lse))
    out, lse = xp.empty((37, 4, 64), DTYPES[kind]), xp.empty((4, 37), np.float32)
    prefix, suffix = ((xp.asarray(a), xp.asarray(b)) for a, b in states)
    cupyflash.merge_attn_states(out, *prefix, *suffix, lse)
    expect_merge(*states, out_dtype=kind).check(_host(out), _host(lse))


def _check_write(xp: Any, kind: str, cache_dtype: str) -> None:
    rng = np.random.default_rng(2)
    key = rng.standard_normal((21, 2, 64)).astype(DTYPES[kind])
    slots = rng.permutation(64)[:21] - 3
    stored = DTYPES[kind] if cache_dtype == "auto" else np.dtype(np.uint8)
    before = np.zeros((4, 16, 2, 64), stored)
    caches = xp.array(before), xp.array(before)
    source = xp.asarray(key)
    cupyflash.reshape_and_cache_flash(
        source, source, *caches, xp.asarray(slots), cache_dtype, 1.0, 1.0
    )
    fp8_dtype = "e4m3" if cache_dtype == "auto" else cache_dtype
    right = write_oracle(key, before, slots, fp8_dtype=fp8_dtype)
    for found in caches:
        if _host(found).tobytes() != right.tobytes():
            raise AssertionError("the cache differs from what was to be written")


def _host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()
