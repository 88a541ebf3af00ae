"""The command line, without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_fa_version import gpu

import cupyflash
from cupyflash.cli import check, main, terminal
from cupyflash.runtime.cubin_cache import CubinCache

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))
    folder.mkdir(mode=0o700)
    return CubinCache(folder)


@pytest.fixture
def no_rich(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    terminal._rich.cache_clear()
    yield
    terminal._rich.cache_clear()


def run(capsys, *arguments, status=0):
    assert main(arguments) == status
    found = capsys.readouterr()
    return found.out if status == 0 else found.err


def test_as_a_module_and_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", "cache", "where"], cwd=tmp_path, capture_output=True,
        text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(ROOT), "CUPYFLASH_CACHE_DIR": str(tmp_path / "kernels")},
    )  # fmt: skip
    assert done.stdout == f"{tmp_path / 'kernels'}\n"


def test_a_reader_that_leaves_is_no_error(tmp_path):
    command = f"{sys.executable} -m cupyflash bench --list | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60,
        cwd=ROOT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def interrupted(folder, handler, *options):
    """How compiling in two processes ends when its group is interrupted, as by a terminal."""
    command = [sys.executable, "-m", "cupyflash", "precompile", "--arch", "sm_80", "--jobs", "2"]
    env = {**os.environ, "CUPYFLASH_CACHE_DIR": str(folder)}
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    ) as process:  # fmt: skip
        try:
            while not list(folder.glob("*.lock")):  # one that compiles
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(1)  # and the other has started
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def test_an_interrupt_is_no_traceback(tmp_path):
    pytest.importorskip("cupy")
    assert interrupted(tmp_path, signal.SIG_DFL) == (130, "cupyflash: interrupted\n")


def test_an_interrupt_that_is_ignored_ends_no_worker(tmp_path):
    """A shell's jobs in the background, and what runs behind nohup, ignore it."""
    pytest.importorskip("cupy")
    few = "attention_fwd_sm80_bf16_bf16_d64"
    assert interrupted(tmp_path, signal.SIG_IGN, "--only", few) == (0, "")


def test_a_terminal_without_the_letter_gets_another():
    command = [sys.executable, "-m", "cupyflash", "explain", "--kv-len", "9", "--gpu", "h200"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=60, check=True)
    assert b"?s on NVIDIA H200" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_no_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cupyflash", "bench", "--list"], cwd=ROOT, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


def test_what_cannot_be_written_is_said_before_the_work(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "checks", lambda xp: pytest.fail("it went to work"))
    nowhere = tmp_path / "nowhere"
    for option, path, words in (
        ("--json", nowhere / "a.json", f"there is no folder {nowhere}"),
        ("--json", tmp_path, "is a folder"),
        ("--plot", tmp_path / "a.txt", "the name must end in"),
        ("--plot", nowhere / "a.png", f"there is no folder {nowhere}"),
    ):
        assert words in run(capsys, "check", "--on", "numpy", option, str(path), status=2)
    (tmp_path / "file").touch()
    options = ("export", "--kv-len", "8", "--gpu", "h200", "--out", str(tmp_path / "file"))
    assert "file: File exists" in run(capsys, *options, status=2)


@pytest.mark.parametrize("command", ["info", "bench", "precompile", "cache", "check", "explain"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "usage: cupyflash" in capsys.readouterr().out


def test_cache_says_where_and_how_much_and_clears(cache, capsys):
    for key in ("a", "b"):
        cache.find_or_make(key, ".cubin", lambda: b"kernel")
    nbytes = sum(path.stat().st_size for path in cache.files())
    assert run(capsys, "cache", "where") == f"{cache.folder}\n"
    assert run(capsys, "cache", "size") == f"{nbytes}\n"
    assert "kernels  2" in run(capsys, "cache")
    assert "removed 2 kernels" in run(capsys, "cache", "clear")
    assert cache.files() == []


def test_info_without_a_gpu(cache, capsys, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    with gpu(None):
        text = run(capsys, "info")
        found = json.loads(run(capsys, "info", "--json"))
    assert "NumPy arrays only" in text
    assert found["cupyflash"] == cupyflash.__version__
    assert found["settings"]["CUPYFLASH_CHECK"] == "1"
    assert str(cache.folder) in found["cache"]
    assert found["gpus"] == []
    assert found["versions"] == {}


def test_info_says_which_version_and_why_not_the_other(capsys, monkeypatch):
    from cupyflash.cli import info

    chosen = info._chosen(info._NEEDS["bf16"], (8, 6))
    assert chosen["version"] == 2
    assert "capability 8.6" in chosen["not"]["3"]
    old = info._chosen(info._NEEDS["bf16"], (7, 5))
    assert old["version"] is None
    assert set(old["not"]) == {"2", "3"}


def explained(capsys, *options, **kwargs):
    lines = run(capsys, "explain", *options, **kwargs)
    return dict(line.split(maxsplit=1) for line in lines.splitlines()) if not kwargs else lines


def test_explain_a_decode_step_of_an_h200(capsys):
    found = explained(
        capsys, "--batch", "64", "--kv-len", "8192", "--page-size", "16", "--gpu", "h200"
    )
    assert "64 requests" in found["problem"]
    assert "32 on 8 of size 128; q bf16" in found["heads"]
    assert found["roof"] == "473.24 µs on NVIDIA H200"
    assert "(sm_90" in found["launch"]


def test_explain_the_numpy_path_and_options(capsys):
    found = run(
        capsys, "explain", "--q-len", "9", "--kv-len", "300", "--dtype", "fp32", "--causal",
        "--window", "50", "0", "--alibi", "--sink", "--lse", "--gpu", "none",
    )  # fmt: skip
    assert "runs on      NumPy on the CPU" in found
    assert "packed keys" in found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-len", "9", "--dtype", "int4"], "--dtype='int4' is not a known type"),
        (["--kv-len", "9", "--gpu", "h200", "--dtype", "fp32"], "float32 attention runs"),
        (["--kv-len", "9", "--head-dim", "20"], "head size 20"),
        (["--kv-len", "-1"], "--kv-len -1 is negative"),
        (["--kv-len", "9", "--gpu", "a100", "--fa-version", "3"], "need 9.0"),
        (["--kv-len", "99999999999999"], "--kv-len 99999999999999 must be below 2147483648"),
        (["--kv-len", "65536", "--batch", "32768"], "numbered in int32"),
        (["--kv-len", "1", "--q-len", "65536", "--batch", "32768"], "numbered in int32"),
        (["--kv-len", "9", "--heads", "2147483640", "--q-len", "9999999"], "an array of shape"),
    ],
)
def test_explain_says_what_is_wrong(options, words, capsys):
    assert words in run(capsys, "explain", *options, status=2)


def test_explain_a_cache_larger_than_the_machine(capsys):
    sizes = ("--batch", "2000", "--kv-len", "1048576")
    packed = explained(capsys, *sizes, "--gpu", "h200")
    paged = explained(capsys, *sizes, "--page-size", "16", "--gpu", "h200")
    assert "keys of at most 1048576" in packed["problem"]
    assert "keys of at most 1048576" in paged["problem"]


def test_explain_here_without_a_gpu(capsys):
    with gpu(None):
        assert "name one of a100" in run(
            capsys, "explain", "--kv-len", "9", "--gpu", "here", status=2
        )


class Terminal:
    """A stream that a person looks at."""

    def __init__(self, stream):
        self.stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self.stream, name)


def test_without_rich_tables_are_plain_and_the_way_to_it_is_said(capsys, monkeypatch, no_rich):
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    for _ in range(2):
        terminal.print_table(["name", "us"], [["a", "1.5"], ["long", "10.0"]])
    assert list(terminal.progress(range(3), 3, "x")) == [0, 1, 2]
    found = capsys.readouterr()
    assert found.out == "name    us\na      1.5\nlong  10.0\n" * 2
    assert found.err.count("pip install 'cupyflash[cli]'") == 1


def test_with_rich_tables_and_progress_are_its(capsys, monkeypatch):
    pytest.importorskip("rich")
    terminal._rich.cache_clear()
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    terminal.print_table(["name", "us"], [["a[b]", "1.5"]])
    assert list(terminal.progress(range(3), 3, "timing")) == [0, 1, 2]
    found = capsys.readouterr()
    assert "a[b]" in found.out
    assert "timing" in found.err
