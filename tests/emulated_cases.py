"""Counts the hypothesis cases that each kernel ran on the emulator, over all workers.

With the whole suite and 200 examples or more, fewer than ``FEWEST`` of a kernel are an error.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["count_cases"]

FEWEST = 200
KERNELS = sorted(p.name for p in (Path(__file__).parents[1] / "kernels_cu").glob("*.cu"))
# What plans of version 3 launch; the others run on 8.0 as well.
HOPPER = {
    "find_prefixes.cu",
    "schedule_shared.cu",
    "share_prefixes.cu",
    *(k for k in KERNELS if "sm90" in k),
}
OWED = [(k, d) for k in KERNELS for d in ("sm_80", "sm_90") if d == "sm_90" or k not in HOPPER]

_cases: Counter[tuple[str, str]] = Counter()
_launched: set[tuple[str, str]] = set()


def _watch_launches() -> None:
    from emulator import EmulatedDevice

    if hasattr(EmulatedDevice.run, "watched"):
        return
    run = EmulatedDevice.run

    @wraps(run)
    def watched(self: Any, program: Any, *args: Any, **options: Any) -> Any:
        report = run(self, program, *args, **options)
        source = program.source or f"{program.symbol}.cu"
        _launched.add((source, self.arch.rstrip("a")))
        return report

    watched.watched = True  # type: ignore[attr-defined]
    EmulatedDevice.run = watched  # type: ignore[method-assign]


def count_cases(test: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a property, each call of which counts as a case of the kernels it launches."""
    if "emulator" not in sys.modules:
        return test
    _watch_launches()

    @wraps(test)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _launched.clear()
        result = test(*args, **kwargs)
        _cases.update(_launched)
        return result

    return counted


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["emulated_cases"] = [[*key, count] for key, count in _cases.items()]
    elif _too_few(session.config) and not exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _too_few(config: pytest.Config) -> list[str]:
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not whole or settings().max_examples < FEWEST:
        return []
    return [f"{k} on {d}: {_cases[k, d]}" for k, d in OWED if _cases[k, d] < FEWEST]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for source, dialect, count in getattr(node, "workeroutput", {}).get("emulated_cases", ()):
        _cases[source, dialect] += count


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not _cases:
        return
    terminalreporter.section("hypothesis cases on the emulator")
    for kernel in sorted({k for k, _ in _cases}):
        counts = {d: n for (k, d), n in sorted(_cases.items()) if k == kernel}
        terminalreporter.write_line(f"{kernel:30} {counts}")
    for line in _too_few(config):
        terminalreporter.write_line(f"fewer than {FEWEST}: {line}", red=True)
