"""The cost model of context parallelism: its parts, and the table of docs/context_parallel.md.

python tests/test_distributed_cost.py     writes the table
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupyflash.distributed.cost import Links, StepShape, predict
from cupyflash.distributed.plan import step_bytes

DOCS = Path(__file__).parents[1] / "docs" / "context_parallel.md"
BEGIN, END = "<!-- table -->", "<!-- end -->"
H200 = Links(read=4.54e12, link=2.6e11, collective=6.1e-6, hop=3e-6, launch=1.8e-6, kernel=8.8e-6)
CONTEXTS = {"128k": 1 << 17, "1M": 1 << 20, "10M": 10 << 20}
SIZES = (1, 2, 8, 72)


def table(machine=H200):
    lines = ["| requests x context | " + " | ".join(f"{n} GPU" for n in SIZES) + " |"]
    lines.append("|---" * (len(SIZES) + 1) + "|")
    for requests in (1, 16):
        for name, context in CONTEXTS.items():
            shape = StepShape(requests, context, num_heads_q=72 * 8)
            one = predict(machine, 1, shape).total
            cells = [f"{requests} x {name}"]
            for size in SIZES:
                total = predict(machine, size, shape).total
                cells.append(f"{total * 1e6:.0f} us" + (f" ({one / total:.1f} x)" * (size > 1)))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_table_is_what_the_model_says():
    text = DOCS.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()


def test_parts_of_a_step():
    shape = StepShape(2, 1000, num_heads_q=32, num_heads_kv=8)
    alone, pair = (predict(H200, size, shape, "a2a") for size in (1, 2))
    assert shape.kv_bytes == 2 * 1000 * 2 * 8 * 128 * 2
    assert alone.read == pytest.approx(shape.kv_bytes / H200.read)
    assert pair.read == pytest.approx(alone.read / 2)
    assert (alone.links, alone.latency, alone.launches) == (0, 0, 0)
    # Queries there, outputs and LSEs back: 2 tokens x 16 heads each.
    rows = 2 * 16
    assert pair.links == pytest.approx(rows * (256 + 256 + 4) / H200.link)
    assert pair.latency == pytest.approx(2 * H200.collective)
    # In one message the other rank's own states come along.
    both = predict(H200, 2, shape, "auto")
    assert both.links == pytest.approx(rows * (256 + 2 * (256 + 4)) / H200.link)
    assert both.launches < pair.launches


MEASURED = {  # microseconds of one GPU and of two, blocks of heads: docs/results
    (1, 131072): (125.6, 93.5),
    (16, 131072): (1918.4, 999.1),
    (1, 1048576): (952.4, 510.4),
}


@pytest.mark.parametrize(("case", "times"), MEASURED.items())
def test_the_model_is_near_what_two_gpus_took(case, times):
    shape = StepShape(*case)
    for size, measured in zip((1, 2), times, strict=True):
        assert predict(H200, size, shape).total * 1e6 == pytest.approx(measured, rel=0.03)


def test_the_bytes_of_both_ways():
    moved = step_bytes(4, 3, 8, 128, 2, "ag_rs")
    assert moved == {
        "all_gather q": 3 * 8 * 256, "all_gather lse": 4 * 3 * 8 * 4,
        "reduce_scatter": 3 * 8 * 128 * 4,
    }  # fmt: skip
    assert sum(step_bytes(4, 3, 8, 128, 2, "a2a").values()) < sum(moved.values())
    states = 3 * 8 * (256 + 4)
    assert step_bytes(4, 3, 8, 128, 2, "a2a")["all_to_all"] == states
    assert step_bytes(4, 3, 8, 128, 2, "ag")["all_gather states"] == 4 * states
    # Few bytes between two ranks go in one message.
    assert list(step_bytes(2, 3, 8, 128, 2, "auto"))[1] == "all_gather states"
    assert list(step_bytes(2, 300, 8, 128, 2, "auto"))[1] == "all_to_all"
    assert list(step_bytes(4, 3, 8, 128, 2, "auto"))[1] == "all_to_all"
    assert step_bytes(1, 3, 8, 128, 2, "a2a") == {}


@pytest.mark.parametrize("combine", ["a2a", "ag", "ag_rs"])
def test_long_contexts_scale_and_short_ones_do_not(combine):
    long, short = StepShape(1, 10 << 20), StepShape(1, 1 << 10)
    one, two = (predict(H200, size, long, combine).total for size in (1, 2))
    assert 1.9 < one / two < 2
    assert predict(H200, 2, short, combine).total > predict(H200, 1, short, combine).total


if __name__ == "__main__":
    text = DOCS.read_text()
    body = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL)
    DOCS.write_text(body)
