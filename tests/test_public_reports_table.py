"""docs/public_reports.md and the tests named after its cases agree."""

from __future__ import annotations

import re
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
