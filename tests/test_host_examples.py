"""The examples of other libraries run where those are installed; on their GPU, else on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name, library):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "hosts" / name)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "library", "words"),
    [
        ("jax_arrays.py", "jax", "JAX on "),
        ("jax_jit.py", "jax", "over three runs"),
        ("torch_tensors.py", "torch", "torch on "),
    ],
)
def test_example(name, library, words):
    assert words in run(name, library)


NUMBA_ALONE = """
import numpy as np
from numba import cuda
@cuda.jit
def double(x):
    x[cuda.grid(1)] *= 2
x = cuda.to_device(np.ones(32, np.float16))
double[1, 32](x)
assert (x.copy_to_host() == 2).all()
"""


@pytest.mark.gpu
def test_numba_example(tmp_path):
    """Where Numba runs a kernel of its own: a release of it does not import with a later NumPy."""
    script = tmp_path / "alone.py"
    script.write_text(NUMBA_ALONE)  # its compiler reads the source
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    if alone.returncode:
        pytest.skip(f"Numba does not run here: {alone.stderr.splitlines()[-1]}")
    assert "bfloat16 error" in run("numba_arrays.py", "numba")


def test_every_example_of_a_host_is_run_somewhere():
    tests = (Path(__file__).name, "test_cli_precompile.py", "test_export.py")
    source = "".join((ROOT / "tests" / name).read_text() for name in tests)
    modules = {"jax_ffi.py"}  # of jax_jit.py
    for path in (ROOT / "examples" / "hosts").iterdir():
        if path.is_file():
            assert path.name in modules or path.name in source
