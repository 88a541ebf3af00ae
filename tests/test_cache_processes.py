"""Compiled kernels on disk: made once, whatever happens to the processes that make them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cupyflash

CHECKOUT = Path(cupyflash.__file__).parents[1]

# Compiles one kernel in a process of its own; says so in COMPILES; waits where the test wants.
CHILD = """
import os, sys, time
from cupyflash.runtime import compile as compiling
from cupyflash.runtime.dtypes import BF16
from cupyflash.runtime.merge_plan import merge_variant

def wait(where):
    if os.environ.get("WAIT") == where:
        open(os.environ["WAITING"], "w").close()
        time.sleep(300)

real, replace = compiling.compile_source, os.replace

def compile_source(*args):
    with open(os.environ["COMPILES"], "a") as log:
        log.write("x")
    wait("compile")
    return real(*args)

def slow_replace(source, target):
    if str(target).endswith(".cubin"):
        wait("replace")
    return replace(source, target)

compiling.compile_source, os.replace = compile_source, slow_replace
print(compiling.compiled_file(merge_variant("sm_90", BF16, BF16)))
with open("/proc/self/maps") as maps:
    print("loaded" if "libnvrtc.so" in maps.read() else "not loaded", file=sys.stderr)
"""


class Processes:
    """Child processes that compile into one cache."""

    def __init__(self, folder):
        self.folder = folder
        self.cache = folder / "cache"
        self.compiles = folder / "compiles"
        self.waiting = folder / "waiting"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CUPYFLASH_")},
            "CUPYFLASH_CACHE_DIR": str(self.cache),
            "COMPILES": str(self.compiles),
            "WAITING": str(self.waiting),
            "CUPY_CACHE_DIR": str(folder / "cupy"),
            "PYTHONPATH": str(CHECKOUT),
        }

    def start(self, **environment):
        return subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, **environment):
        """The file that a child made or found, and what it wrote to stderr."""
        return self.end(self.start(**environment))

    @staticmethod
    def end(process):
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        return Path(out.strip()), error

    def kernels(self):
        """All that is in the cache but what is known of NVRTC."""
        return [p for p in self.cache.iterdir() if not p.name.startswith("nvrtc-")]

    def count(self):
        return len(self.compiles.read_text()) if self.compiles.exists() else 0


@pytest.fixture
def processes(tmp_path):
    return Processes(tmp_path)


def test_eight_cold_processes_compile_once(processes):
    children = [processes.start() for _ in range(8)]
    paths = {processes.end(child)[0] for child in children}
    assert len(paths) == 1
    assert processes.count() == 1
    assert processes.kernels() == list(paths)
    assert stat.S_IMODE(processes.cache.stat().st_mode) == 0o700


def test_a_warm_process_does_not_load_the_compiler(processes):
    path, said = processes.run()
    assert said == "loaded\n"
    assert processes.run() == (path, "not loaded\n")
    (record,) = processes.cache.glob("nvrtc-*.json")
    kept = record.read_text()
    for changed in (kept[:-1], "{}", "[]", kept.replace('"identity": [', '"identity": [1, ')):
        record.write_text(changed)
        assert processes.run() == (path, "loaded\n")
        assert record.read_text() == kept
    record.write_text(kept.replace('"version": [1', '"version": [2'))  # trusted, so another key
    assert processes.run()[0] != path
    assert processes.run(LD_LIBRARY_PATH="/absent") == (path, "loaded\n")
    assert processes.count() == 2


@pytest.mark.parametrize("where", ["compile", "replace"])
def test_a_killed_compiler_leaves_nothing_in_the_way(processes, where):
    child = processes.start(WAIT=where)
    deadline = time.monotonic() + 200
    while not processes.waiting.exists():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    follower = processes.start()  # waits for the lock
    time.sleep(2)
    assert follower.poll() is None
    left = {p.suffix for p in processes.kernels()}
    assert left == ({".lock"} if where == "compile" else {".lock", ".tmp"})
    child.send_signal(signal.SIGKILL)
    child.communicate()
    path, _ = processes.end(follower)
    assert processes.count() == 2
    assert processes.kernels() == [path]


@pytest.mark.parametrize("home", ["a file", "missing"])
def test_a_home_that_cannot_be_written(processes, home):
    blocked = processes.folder / "blocked"
    blocked.touch()
    environment = {"CUPYFLASH_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    where = blocked if home == "a file" else blocked / "absent"
    path, error = processes.run(HOME=str(where), **environment)
    assert "RuntimeWarning: kernels are compiled again in each process" in error
    assert "set CUPYFLASH_CACHE_DIR" in error
    assert processes.count() == 1
    assert not path.exists()  # the process's own folder went with it
    assert path.parent.name.startswith("cupyflash-")
