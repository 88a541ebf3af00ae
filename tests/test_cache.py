"""Compiled kernels on disk: private, checked, and made once whatever happens to the makers."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import cupyflash
from cupyflash.runtime import cubin_cache as caching
from cupyflash.runtime.cubin_cache import CubinCache, cubin_cache, why_not_private

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


def test_no_home_at_all(monkeypatch):
    def unknown(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPYFLASH_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)
    with private_folders(), pytest.warns(RuntimeWarning, match="no home folder"):
        assert stat.S_IMODE(cubin_cache().folder.stat().st_mode) == 0o700


class private_folders:  # noqa: N801
    """Forgets and removes the private folders of this process."""

    def __enter__(self):
        caching._private.clear()

    def __exit__(self, *error):
        for folder in caching._private.values():
            caching.shutil.rmtree(folder)
        caching._private.clear()


@pytest.fixture
def open_folder():
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


class as_other_user:  # noqa: N801
    """Root takes another user's rights: nothing is read-only to root."""

    def __enter__(self):
        self.user = os.geteuid()
        if self.user == 0:
            os.seteuid(65534)

    def __exit__(self, *error):
        if self.user == 0:
            os.seteuid(0)


def test_a_read_only_folder_is_left_for_a_private_one(open_folder, monkeypatch):
    folder = open_folder / "cache"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
    folder.chmod(0o555)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))
    with private_folders(), as_other_user():
        with pytest.warns(RuntimeWarning, match=f"{folder} cannot be written"):
            found = cubin_cache()
        assert cubin_cache().folder == found.folder  # one folder and one warning a process
        assert found.find_or_make("k", ".cubin", lambda: b"kernel").read_bytes()[:6] == b"kernel"


def test_a_folder_below_a_read_only_one(open_folder, monkeypatch):
    open_folder.chmod(0o555)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(open_folder / "a" / "b"))
    with private_folders(), as_other_user(), pytest.warns(RuntimeWarning, match="cannot be made"):
        assert cubin_cache().folder.name.startswith("cupyflash-")


def foreign_folder(tmp_path):
    if os.geteuid():
        return Path("/usr")
    folder = tmp_path / "foreign"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    return folder


def test_a_folder_of_another_user_is_refused(tmp_path):
    assert "belongs to user" in why_not_private(foreign_folder(tmp_path))


def test_a_link_to_a_folder_of_another_user_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(foreign_folder(tmp_path))
    assert "belongs to user" in why_not_private(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_loaded(tmp_path):
    cache = CubinCache(tmp_path)
    os.chown(cache.find_or_make("key", ".cubin", lambda: b"theirs"), 12345, -1)
    assert cache.find("key", ".cubin") is None
    assert cache.find_or_make("key", ".cubin", lambda: b"ours").read_bytes()[:4] == b"ours"


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    assert "others may write" in why_not_private(folder)
    folder.chmod(0o755)
    assert not why_not_private(folder)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    assert "is not a folder" in why_not_private(tmp_path / "file")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content + b"\n",
        lambda content: content[-80:],
    ],
)
def test_a_damaged_file_is_made_again(tmp_path, damage):
    cache = CubinCache(tmp_path)
    body = bytes(range(256)) * 4
    path = cache.find_or_make("key", ".cubin", lambda: body)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert cache.find("key", ".cubin") is None
    assert cache.find_or_make("key", ".cubin", lambda: body).read_bytes() == whole


def test_a_failed_compilation_leaves_no_file(tmp_path):
    cache = CubinCache(tmp_path)

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.find_or_make("key", ".cubin", fail)
    assert cache.files() == []
    assert cache.find_or_make("key", ".cubin", lambda: b"yes").exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("no locks available")

    monkeypatch.setattr(caching.fcntl, "flock", refuse)
    assert CubinCache(tmp_path).find_or_make("key", ".cubin", lambda: b"kernel").exists()
