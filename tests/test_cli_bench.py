"""``bench`` on the command line, without a GPU."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from test_fa_version import gpu

from cupyflash.bench import H200, bench_cases
from cupyflash.cli import bench, main

ROOT = Path(__file__).parents[1]


def run(capsys, *arguments, status=0):
    assert main(arguments) == status
    found = capsys.readouterr()
    return found.out if status == 0 else found.err


def test_bench_lists_its_cases_and_refuses_unknown_ones(capsys):
    assert run(capsys, "bench", "--list", "--only", "merge,write").split() == [
        "write/8192tok", "merge/8192tok",
    ]  # fmt: skip
    assert "no case has that" in run(capsys, "bench", "--only", "nothing", status=2)
    assert "those known are" in run(capsys, "bench", "--peers", "nobody", status=2)


def test_bench_without_a_gpu(capsys):
    with gpu(None):
        assert "bench needs a GPU" in run(capsys, "bench", status=2)


@pytest.fixture
def timed(monkeypatch):
    """A bench of two cases that ran elsewhere; the second is interrupted on demand."""
    rows = [
        {
            "case": case.name, "floor_us": 10.0, "flops": case.flops, "bytes": case.bytes_moved,
            "us": {"cupyflash": 12.5 * n, "fa3": 20.0}, "host_us": {"cupyflash": 7.0},
            "skipped": {"fa2": "not paged"},
        }
        for n, case in enumerate(bench_cases("merge,write"), 1)
    ]  # fmt: skip
    stop = []

    def run_bench(only, providers, folder, roofs):
        assert (providers, roofs) == (["cupyflash", "fa3"], H200)
        yield rows[0]
        if stop:
            raise KeyboardInterrupt
        yield rows[1]

    monkeypatch.setattr(bench, "run_bench", run_bench)
    monkeypatch.setattr(bench, "header", lambda root: {"gpu": "NVIDIA H200", "commit": "abc"})
    monkeypatch.setattr(bench, "roofs_here", lambda measure: (H200, "recorded"))
    monkeypatch.setattr(bench, "_need_gpu", lambda: None)
    return rows, stop


ARGUMENTS = ("bench", "--only", "merge,write", "--peers", "fa3")


def test_bench_writes_a_table_json_csv_and_a_plot(timed, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    paths = {kind: tmp_path / f"run.{kind}" for kind in ("json", "csv", "png")}
    options = [f"--{kind}" if kind != "png" else "--plot" for kind in paths]
    pairs = [text for pair in zip(options, map(str, paths.values()), strict=True) for text in pair]
    table = run(capsys, *ARGUMENTS, *pairs).splitlines()
    assert table[2].startswith("roofs   from recorded, read 4.54e+12")
    (line,) = [line for line in table if line.startswith("write/8192tok  ")]
    assert line.split() == ["write/8192tok", "10.0", "12.5", "80%", "fa3", "20.0", "1.60"]
    assert "merge/8192tok, fa2: not paged" in table
    written = json.loads(paths["json"].read_text())
    assert written["rows"] == timed[0]
    assert written["header"]["roofs"]["read"] == H200.read
    rows = list(csv.DictReader(paths["csv"].read_text().splitlines()))
    assert [(r["case"], r["provider"], float(r["of_roof"])) for r in rows[:2]] == [
        ("write/8192tok", "cupyflash", 0.8),
        ("write/8192tok", "fa3", 0.5),
    ]
    assert paths["png"].read_bytes().startswith(b"\x89PNG")


def test_bench_keeps_what_is_done_when_it_is_interrupted(timed, capsys, tmp_path):
    timed[1].append("stop")
    with pytest.raises(KeyboardInterrupt):
        main([*ARGUMENTS, "--json", str(tmp_path / "run.json")])
    assert json.loads((tmp_path / "run.json").read_text())["rows"] == timed[0][:1]


def test_bench_says_how_to_get_what_plots_need(timed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = run(capsys, *ARGUMENTS, "--plot", "x.png", status=2)
    assert "pip install 'cupyflash[cli]'" in said
