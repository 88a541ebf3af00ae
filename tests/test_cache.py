"""Compiled kernels on disk: in folders that are private, in files that are checked."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

import cupyflash
from cupyflash.runtime import cubin_cache as caching
from cupyflash.runtime.cubin_cache import CubinCache, cubin_cache, why_not_private

CHECKOUT = Path(cupyflash.__file__).parents[1]


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
