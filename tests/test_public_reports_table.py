"""docs/public_reports.md and the tests named after its cases agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "public_reports.md"


def test_every_case_of_the_table_has_a_test_and_every_test_is_in_the_table():
    rows = re.findall(r"^\| (B\d+) \|.*\| (\w+) \|$", TABLE.read_text(), re.MULTILINE)
    found = {
        (case.upper(), path.stem.removeprefix("test_public_reports_"))
        for path in TESTS.glob("test_public_reports_*.py")
        for case in re.findall(r"^def test_(b\d+)_", path.read_text(), re.MULTILINE)
    }
    assert set(rows) == found
    assert len(rows) == len(set(rows)) == len({case for case, _ in rows}) == 60


KINDS = ("numpy", "emulator", "gpu")
LARGE = {"B44"}  # on the emulator 65536 blocks would take an hour
OF_A_DEVICE = {"B80", "B82", "B86", "B89"}  # devices, files, memory, choices


def test_every_case_runs_on_every_path():
    """NumPy, the emulator and a GPU, but for those that are about something else."""
    files = sorted(str(path) for path in TESTS.glob("test_public_reports_*.py"))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *files]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TESTS.parent)
    found = {}
    for case, settings in re.findall(r"::test_(b\d+)_\w+(.*)", listed.stdout):
        found.setdefault(case.upper(), set()).update(kind for kind in KINDS if kind in settings)
    assert len(found) == 60
    missing = {case: set(KINDS) - kinds for case, kinds in found.items() if len(kinds) < 3}
    assert set(missing) == LARGE | OF_A_DEVICE
    assert {case: missing[case] for case in LARGE} == {"B44": {"emulator"}}
