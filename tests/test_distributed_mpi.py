"""Ranks of MPI on this machine: collectives, steps, and a rank that does not come."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
pytestmark = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="no MPI is installed"
)

BODY = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from cupyflash.distributed import MpiCommunicator, RankLostError
group = MpiCommunicator(timeout={timeout})
"""
COLLECTIVES = """
from test_distributed_ranks import collectives
assert collectives(group) == (group.rank, group.size)
"""
STEPS = """
from ranks import Step, run_step
from test_distributed_attention import LITERAL
for case in LITERAL:
    Step(case, group.size).check(group.rank, *run_step(group, case))
"""
DISAGREE = """
from cupyflash.distributed import DisagreementError
from test_distributed_ranks import another_dtype
try:
    another_dtype(group)
except DisagreementError as error:
    print("refused:", error)
"""
LATE = """
import time
if group.rank == 1:
    time.sleep(3)
try:
    group.agree("the step", b"")
except RankLostError as error:
    print("lost:", error, flush=True)
    group.abort()
"""


def mpirun(size, body, timeout=30.0):
    code = BODY.format(tests=str(ROOT / "tests"), root=str(ROOT), timeout=timeout) + body
    return subprocess.run(
        [MPIRUN, "-n", str(size), sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_collectives_and_steps(size):
    done = mpirun(size, COLLECTIVES + STEPS)
    assert done.returncode == 0, done.stderr[-2000:]


def test_ranks_that_disagree_all_fail():
    done = mpirun(3, DISAGREE)
    assert done.stdout.count("refused:") == 3, done.stderr[-2000:]


def test_a_rank_that_does_not_come_ends_the_others():
    done = mpirun(3, LATE, timeout=0.5)
    assert "lost: rank" in done.stdout
    assert done.returncode != 0


def test_the_example_under_mpirun():
    example = ROOT / "examples" / "08_context_parallel.py"
    done = subprocess.run(
        [MPIRUN, "-n", "2", sys.executable, str(example), "--device", "cpu"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "2 ranks, NumPy arrays, MpiCommunicator" in done.stdout, done.stderr[-2000:]
    assert "44 keys" in done.stdout
