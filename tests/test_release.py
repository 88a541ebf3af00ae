"""What users install: sdist and wheel, the command, and types for their own code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import ml_dtypes
import pytest

import cupyflash

ROOT = Path(__file__).resolve().parent.parent

USER = """
import numpy as np
import cupyflash
from cupyflash import AttentionBounds, explain, flash_attn_varlen_func, workspace_size
from cupyflash.testing import Case

bounds = AttentionBounds(
    batch_size=1, max_seqlen_q=1, max_seqlen_k=9, num_heads_q=1, num_heads_kv=1, headdim=64
)
size: int = workspace_size(bounds)
q = np.zeros((1, 1, 64), np.float16)
starts = np.array([0, 1], np.int32)
flash_attn_varlen_func(q, q, q, 1, starts, 1, starts, causal=True)
flops: int = explain(q, q, q, 1, starts, 1, starts).flops
case: Case = Case(lengths=((1, 2),)).replace(head_dim=64)
version: str = cupyflash.__version__
"""
WRONG = {
    "flash_attn_varlen_func(q, q, q, 1, starts, 1, starts, casual=True)": "call-arg",
    'flash_attn_varlen_func(q, q, q, "1", starts, 1, starts)': "arg-type",
    "text: str = workspace_size(bounds)": "assignment",
    "cupyflash.flash_attention": "attr-defined",
    "AttentionBounds(1, 1, 9, 1, 1, 64)": "call-arg",
}


def command(*words, **options):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=300, check=False,
        **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel that was built from the sdist, and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel; it borrows NumPy and ml_dtypes."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    command(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    command(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
        "--disable-pip-version-check", built[0],
    )  # fmt: skip
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in ("numpy", "ml_dtypes", "numpy.libs"):
        found = Path(ml_dtypes.__file__).parents[1] / package
        if found.exists():
            (packages / package).symlink_to(found)
    return python


def clean():
    """No checkout and no settings of the test's own."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "CUPYFLASH_"))}


def test_the_sdist_holds_what_a_build_and_the_tests_need(built):
    wheel, sdist = built
    version = cupyflash.__version__
    assert wheel.name == f"cupyflash-{version}-py3-none-any.whl"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = command("git", "ls-files", cwd=ROOT).split()
    wanted = (
        "cupyflash/",
        "kernels_cu/",
        "tests/",
        "examples/",
        "docs/",
        "LICENSE",
        "CHANGELOG.md",
    )
    missing = [n for n in listed if n.startswith(wanted) and (ROOT / n).exists() and n not in names]
    assert not missing
    assert sdist.stat().st_size < 3_000_000


def test_a_fresh_environment_computes(fresh, tmp_path):
    code = (
        "import cupyflash, numpy as np\n"
        "q = np.ones((1, 1, 8), np.float32); s = np.array([0, 1], np.int32)\n"
        "print(cupyflash.__file__, cupyflash.flash_attn_varlen_func(q, q, q, 1, s, 1, s).sum())"
    )
    file, total = command(fresh, "-c", code, cwd=tmp_path, env=clean()).split()
    assert Path(file).is_relative_to(fresh.parents[1])
    assert total == "8.0"


def test_the_command_is_installed(fresh, tmp_path):
    program = fresh.parent / "cupyflash"
    environment = {**clean(), "CUPYFLASH_CACHE_DIR": str(tmp_path / "kernels")}
    found = command(program, "info", cwd=tmp_path, env=environment)
    assert re.search(rf"^cupyflash +{cupyflash.__version__}$", found, re.MULTILINE)
    assert "CuPy is not installed" in found
    assert "checks passed on NumPy arrays" in command(
        program, "check", "--quick", cwd=tmp_path, env=environment
    )
    explained = command(
        program, "explain", "--kv-len", "9", "--gpu", "h200", cwd=tmp_path, env=environment
    )
    assert "(sm_90" in explained


def checked(fresh, tmp_path, code):
    """What mypy says of user code, with the installed package."""
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(fresh),
         "--no-error-summary", "--cache-dir", str(tmp_path / "mypy"), "--config-file", os.devnull,
         str(file)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=clean(),
    )  # fmt: skip
    return done.stdout


def test_user_code_is_type_checked(fresh, tmp_path):
    assert checked(fresh, tmp_path, USER) == ""
    lines = checked(fresh, tmp_path, USER + "\n".join(WRONG) + "\n").splitlines()
    first = USER.count("\n") + 1
    found = {
        int(line.split(":")[1]) - first: line.rsplit("[", 1)[1][:-1]
        for line in lines
        if "error" in line
    }
    assert found == dict(enumerate(WRONG.values()))
