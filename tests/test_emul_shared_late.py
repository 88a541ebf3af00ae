"""Lengths and trees that the launch in front writes while the schedule is made, on the emulator.

There a launch in front is always over, so what is read early is changed in the kernel's text.
"""

from __future__ import annotations

import pytest
from emulator.planted_shared import KERNEL, LATE_CASES, PlantedShared

_READ = r"const Lengths found\(p, s, threadIdx\.x\);"
_NOISE = "0x9e3779b9u * (threadIdx.x + 1) ^ 0x85ebca6bu * (threadIdx.x + 7)"
_JUNK = {
    "older": "found.keys -= 70;",
    "others": "found.request = p.batch - 1 - found.request, found.node[0].x = 0;",
    "largest": "found.keys = found.q_end = found.node[0].x = found.node[0].y = 0x7fffffff;",
    "lowest": "found.keys = found.q_end = found.node[0].x = found.node[0].y = 0x80000000;",
    "noise": (
        f"unsigned x = {_NOISE}; found.keys = x, found.q_begin = x *= 3, found.q_end = x *= 5, "
        "found.node[0].x = x *= 7, found.node[0].y = x *= 9;"
    ),
    "places": (
        f"unsigned x = {_NOISE}; found.keys = x % 4096, found.q_end = found.q_begin + x % 5, "
        "found.node[0] = make_int2(int(x >> 8) % 64 - 32, x % 4096);"
    ),
}


@pytest.mark.parametrize("junk", _JUNK)
@pytest.mark.parametrize("case", LATE_CASES)
def test_lengths_that_are_written_late(case, junk):
    changed = f"Lengths found(p, s, threadIdx.x);\n if (!over) {{ {_JUNK[junk]} }}"
    late = PlantedShared(junk, KERNEL, _READ, changed, LATE_CASES[case])
    assert late.caught(late.device(), 1) is None
