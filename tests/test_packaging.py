"""The wheel: every kernel source is in it, nothing else is, and it stays small."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


def _tracked(folder):
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def test_wheel_holds_the_package_and_every_kernel_source(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    kernels = {f"cupyflash/{name}" for name in _tracked("kernels_cu")}
    assert kernels
    assert _tracked("cupyflash") | kernels <= names
    assert {n.split("/")[0] for n in names} == {"cupyflash"}


def test_wheel_is_at_most_one_megabyte(wheel):
    assert wheel.stat().st_size <= 1_000_000


def test_installed_wheel_finds_its_kernels_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        "from cupyflash.runtime.kernel_source import kernel_root\n"
        "import cupyflash; print(cupyflash.__file__, kernel_root())"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    package, kernels = done.stdout.split()
    assert Path(package).is_relative_to(tmp_path)
    assert Path(kernels) == tmp_path / "cupyflash" / "kernels_cu"
