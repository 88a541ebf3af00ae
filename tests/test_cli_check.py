"""``python -m cupyflash check``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_cli import run
from test_fa_version import gpu

import cupyflash
from cupyflash.cli import check, main


def test_check_on_numpy(capsys):
    assert "checks passed on NumPy arrays" in run(capsys, "check", "--on", "numpy", "--quick")


def test_check_writes_and_draws_errors(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    paths = tmp_path / "errors.json", tmp_path / "errors.png"
    options = ["--json", str(paths[0]), "--plot", str(paths[1])]
    table = run(capsys, "check", "--on", "numpy", "--quick", *options)
    found = json.loads(paths[0].read_text())
    assert {row["types"] for row in found} >= {"bf16", "bf16 / e4m3", "fp32"}
    assert all(0 <= row["share"] <= 1 and row["baseline"] > 0 for row in found)
    bf16 = [row["share"] for row in found if row["types"] == "bf16"]
    assert f"{max(bf16):.2f}" in table
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_check_covers_every_operation_and_type():
    names = " ".join(name for name, _ in check.checks(np))
    for word in ("fp32", "fp16", "bf16", "e4m3", "merge_attn_states", "fp8_e5m2", "alibi='head'"):
        assert word in names


def test_check_fails_where_a_result_is_wrong(capsys, monkeypatch):
    real = cupyflash.flash_attn_varlen_func

    def wrong(*args, **kwargs):
        out, lse = real(*args, **kwargs)
        lse[:, 0] += 0.1
        return out, lse

    monkeypatch.setattr(check.cupyflash, "flash_attn_varlen_func", wrong)
    assert main(["check", "--on", "numpy", "--quick"]) == 1
    found = capsys.readouterr()
    assert "AssertionError" in found.err
    passed, listed = map(int, found.out.splitlines()[-1].split(" checks")[0].split(" of "))
    assert 1 <= passed < listed


@pytest.mark.gpu
def test_check_on_this_gpu(tmp_path, capsys):
    text = run(capsys, "check", "--quick", "--on", "gpu", "--json", str(tmp_path / "errors.json"))
    assert "checks passed on the GPU" in text
    margins = json.loads((tmp_path / "errors.json").read_text())
    assert {found["types"] for found in margins} == {"fp16", "bf16", "bf16 / e4m3", "e4m3"}
    assert max(found["share"] for found in margins) <= 1


def test_check_on_a_gpu_that_is_not_there(capsys):
    with gpu(None):
        assert "--on gpu" in run(capsys, "check", "--on", "gpu", status=2)
