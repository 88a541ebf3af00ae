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
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "hosts" / name)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
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


JAX_LATE = """
import cupy as cp, jax, jax.numpy as jnp, numpy as np
from cupyflash import flash_attn_varlen_func

@jax.jit
def late(q, seed):  # some milliseconds
    a = jnp.full((2048, 2048), 1 / 2048, q.dtype)
    b = jax.lax.fori_loop(0, 200, lambda i, b: b @ a, a)
    return jax.random.normal(jax.random.key(seed), q.shape, q.dtype) + 0 * b[0, 0]

rng = np.random.default_rng(0)
kv = [cp.asarray(rng.standard_normal((300, 2, 64)).astype(np.float16)) for _ in "kv"]
zeros = jnp.zeros((300, 4, 64), jnp.float16)
starts = jnp.array([0, 300], jnp.int32)
late(zeros, 0).block_until_ready()
waited = 0
for stream in (None, cp.cuda.Stream(non_blocking=True)):
    for seed in range(6):
        q = late(zeros, seed)
        outs = [cp.full(zeros.shape, np.nan, np.float16) for _ in "ab"]
        cp.cuda.Device().synchronize()
        q = late(zeros, seed + 1)
        for out in outs:
            flash_attn_varlen_func(q, *kv, 300, starts, 300, starts, out=out, stream=stream)
            waited += not q.is_ready()
            q.block_until_ready()
            cp.cuda.Device().synchronize()
        assert (outs[0].view(np.uint16) == outs[1].view(np.uint16)).all()
assert waited > 3, waited  # the call did not wait on the host
"""


@pytest.mark.gpu
def test_what_jax_still_computes_is_waited_for_on_the_device():
    if find_spec("jax") is None:
        pytest.skip("jax is not installed")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", JAX_LATE], capture_output=True, text=True, env=env, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_example_of_a_host_is_run_somewhere():
    tests = (Path(__file__).name, "test_cli_precompile.py", "test_export.py")
    source = "".join((ROOT / "tests" / name).read_text() for name in tests)
    modules = {"jax_ffi.py"}  # of jax_jit.py
    for path in (ROOT / "examples" / "hosts").iterdir():
        if path.is_file():
            assert path.name in modules or path.name in source
