"""``bench`` on the command line, without a GPU."""

from __future__ import annotations

import csv
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Path as Where
from test_fa_version import gpu

from cupyflash.bench import H200, bench_cases
from cupyflash.bench.inputs import DryInputs
from cupyflash.bench.kernels import needed_kernels
from cupyflash.bench.providers import cupyflash
from cupyflash.cli import bench, main
from cupyflash.cli.call_options import GPUS
from cupyflash.cli.compile_many import JOBS, compile_ahead, each_variant
from cupyflash.runtime.compile import find_compiled
from cupyflash.runtime.variants import all_variants

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
    between = []  # called when the first case is done

    def run_bench(only, providers, folder, roofs):
        assert (providers, roofs) == (["cupyflash", "fa3"], H200)
        assert compiled == [(["merge_attn_states_bf16_bf16", "reshape_and_cache_bf16_bf16"], JOBS)]
        yield rows[0]
        for call in between:
            call()
        yield rows[1]

    compiled = []
    monkeypatch.setattr(
        bench, "compile_ahead",
        lambda variants, jobs: compiled.append((sorted(v.symbol for v in variants), jobs)),
    )  # fmt: skip
    monkeypatch.setattr(bench, "_device", lambda: GPUS["h200"])
    monkeypatch.setattr(bench, "run_bench", run_bench)
    monkeypatch.setattr(bench, "header", lambda root: {"gpu": "NVIDIA H200", "commit": "abc"})
    monkeypatch.setattr(bench, "roofs_here", lambda measure: (H200, "recorded"))
    monkeypatch.setattr(bench, "_need_gpu", lambda: None)
    return rows, between


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


def interrupt():
    raise KeyboardInterrupt


def test_bench_keeps_what_is_done_when_it_is_interrupted(timed, capsys, tmp_path):
    timed[1].append(interrupt)
    assert main([*ARGUMENTS, "--json", str(tmp_path / "run.json")]) == 130
    assert json.loads((tmp_path / "run.json").read_text())["rows"] == timed[0][:1]
    assert "write/8192tok, fa2: not paged" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_each_case_shows_and_is_written_when_it_is_done(
    terminal, timed, capsys, tmp_path, monkeypatch
):
    """A run that is killed between two cases has told everything of the first."""
    if terminal:
        pytest.importorskip("rich")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    seen = []

    def look():
        seen.append(capsys.readouterr().out)
        seen.append(json.loads((tmp_path / "run.json").read_text())["rows"])
        seen.append(list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines())))

    timed[1].append(look)
    options = ["--json", str(tmp_path / "run.json"), "--csv", str(tmp_path / "run.csv")]
    assert main([*ARGUMENTS, *options]) == 0
    shown, rows, lines = seen
    assert "write/8192tok" in shown
    assert "merge/8192tok" not in shown
    assert rows == timed[0][:1]
    assert [line["case"] for line in lines] == ["write/8192tok"] * 2
    assert "merge/8192tok" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.json"]


def test_bench_says_how_to_get_what_plots_need(timed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = run(capsys, *ARGUMENTS, "--plot", "x.png", status=2)
    assert "pip install 'cupyflash[cli]'" in said


SMALL = [
    replace(case, q_lens=(1, 1), k_lens=(40, 7))
    for case in bench_cases("decode/gqa32-8/b8/s8192,decode/fp8kv/gqa32-8/b64,write,merge")
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_case_needs_the_kernels_that_it_runs(case):
    with Where("emulator-sm_90").active() as device:
        device.kernels.clear()
        cupyflash(DryInputs(case))()  # of zeros, once they are touched
        ran = {variant.symbol for variant in device.kernels}
    assert ran
    assert ran == {variant.symbol for variant in needed_kernels([case], device.info)}


def test_the_kernels_of_all_cases_are_known_for_every_gpu():
    for name, info in GPUS.items():
        found = needed_kernels(bench_cases(), info)
        assert len(found) == len(set(found))
        assert {v.arch.rstrip("a") for v in found} == {
            f"sm_{info.capability[0]}{info.capability[1]}"
        }
        assert any("sm90" in v.symbol for v in found) == (name in ("h100", "h200"))


def process(variant):
    return os.getpid()


def test_several_kernels_are_compiled_by_other_processes(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    few = [v for v in all_variants("sm_80") if v.source == "merge_attn_states.cu"][:3]
    assert os.getpid() not in each_variant(process, few, jobs=2)
    assert each_variant(process, few, jobs=1) == [os.getpid()] * 3
    assert [find_compiled(v) for v in few] == [None] * 3
    assert compile_ahead(few[:2], jobs=2) == 2
    assert [find_compiled(v) is None for v in few] == [False, False, True]
    assert compile_ahead(few, jobs=2) == 1


def test_what_does_not_compile_is_left_to_its_call(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPYFLASH_NO_COMPILE", "1")
    (one, *_) = all_variants("sm_80")
    assert compile_ahead([one, replace(one, arch="sm_999a")]) == 1
    assert find_compiled(one) is None
