"""Hypothesis profiles, the ``gpu`` marker, and the paths that contract tests run on."""

from __future__ import annotations

import functools
import os

# One BLAS thread a process: xdist fills the cores, and spinning threads would stall each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import emulated_cases
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cupyflash.testing.requests import to_numpy

_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_QUIET)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_QUIET,
)
settings.register_profile("deep", max_examples=20_000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Which paths an operation has; a new kernel family adds its path here and inherits every test.
ATTENTION_PATHS = ("numpy", "emulator-sm_80", "emulator-sm_90", "gpu")
LATENT_PATHS = ("numpy", "emulator-sm_80", "emulator-sm_90", "gpu")
# The emulator runs 8.0 and 9.0: fp8 conversion is arithmetic there and an instruction here.
MERGE_PATHS = ("numpy", "emulator-sm_80", "emulator-sm_90", "gpu")
WRITE_PATHS = ("numpy", "emulator-sm_80", "emulator-sm_90", "gpu")
# Cases of more than a few hundred thousand scores: minutes on the emulator, nothing elsewhere.
LARGE_PATHS = ("numpy", "gpu")
# Steps of an engine make many calls; what the emulator can show of them has tests of its own.
STEP_PATHS = ("numpy", "gpu")


def _gpu_missing() -> str:
    """Why there is no GPU to test on; empty if there is one."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    return "" if cupy.is_available() else "no CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(emulated_cases)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_missing() if marked else ""
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


# What the emulator runs of a property of all paths: a kernel there takes a thousand times as long.
# Properties of its own (tests/test_emul_*.py) draw each kernel as often as the profile says.
EMULATED_SHARE = 0.1


def _first(count: int, test: Callable[..., Any]) -> Callable[..., Any]:
    """``test`` for ``count`` examples, then nothing; once it has failed, always."""
    ran, failed = 0, False

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran, failed
        ran += 1
        if ran > count and not failed:
            return None
        try:
            return test(*args, **kwargs)
        except BaseException:
            failed = True
            raise

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    property_test = getattr(getattr(item, "function", None), "hypothesis", None)
    if property_test is None:
        return (yield)
    whole = property_test.inner_test
    body = emulated_cases.count_cases(whole)
    if "emulator" in item.name:
        body = _first(max(5, round(settings().max_examples * EMULATED_SHARE)), body)
    property_test.inner_test = body
    try:
        return (yield)
    finally:
        property_test.inner_test = whole


class Path:
    """Where a test runs: an array module, and what makes the library take that path."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.xp: Any = np
        if name == "gpu":
            import cupy

            self.xp = cupy

    def active(self) -> AbstractContextManager[Any]:
        """A context in which public functions take this path."""
        if not self.name.startswith("emulator"):
            return nullcontext()
        from emulator import emulated

        return emulated(self.name.partition("-")[2])

    def array(self, values: Any, dtype: Any = None) -> Any:
        return self.xp.asarray(np.asarray(values, dtype))

    @staticmethod
    def host(array: Any) -> np.ndarray[Any, Any]:
        return to_numpy(array)


def _params(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.gpu) if n == "gpu" else n for n in names]


def _path(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path(request.param)
    with path.active():
        yield path


attention_path = pytest.fixture(params=_params(ATTENTION_PATHS), name="path")(_path)
latent_path = pytest.fixture(params=_params(LATENT_PATHS), name="latent_path")(_path)
large_path = pytest.fixture(params=_params(LARGE_PATHS), name="large_path")(_path)
merge_path = pytest.fixture(params=_params(MERGE_PATHS), name="merge_path")(_path)
write_path = pytest.fixture(params=_params(WRITE_PATHS), name="write_path")(_path)
step_path = pytest.fixture(params=_params(STEP_PATHS), name="step_path")(_path)


@pytest.fixture
def hopper_gpu() -> None:
    """For tests of what runs on a GPU of compute capability 9.0 alone."""
    from cupyflash.fa_version import is_fa_version_supported

    if not is_fa_version_supported(3):
        pytest.skip("version 3 needs compute capability 9.0")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that was queued as an earlier one was; nothing is known at first."""
    from stand_in import forget

    from cupyflash.runtime.recording import Recording

    count: list[int] = []
    queue = Recording.queue

    def counted(self: Recording) -> bool:
        count.append(1)
        return queue(self)

    monkeypatch.setattr(Recording, "queue", counted)
    forget()
    return count
