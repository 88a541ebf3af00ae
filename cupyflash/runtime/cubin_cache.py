"""Compiled kernels on disk: private, checked, made once however many processes start at once."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from . import env

__all__ = ["CubinCache", "cubin_cache", "private_cache", "why_not_private"]

# Ends every file. A loader stops at the end of an ELF image, and reads this as a comment in PTX.
_TRAILER = b"\n// sha256 %s\n"
_TRAILER_NBYTES = len(_TRAILER % (b"0" * 64))


class CubinCache:
    """Compiled kernels in one folder, by key.

    A file is written under another name and renamed, ends in the digest of its content, and is made
    again when that does not match. A lock per key lets one process compile while others wait; a
    process that dies lets go of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str, ending: str) -> Path | None:
        """The file of a key if it is there and whole."""
        path = self.folder / f"{key}{ending}"
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return None
                content = file.read()
        except OSError:
            return None
        body, trailer = content[:-_TRAILER_NBYTES], content[-_TRAILER_NBYTES:]
        return path if body and trailer == _trailer(body) else None

    def find_or_make(self, key: str, ending: str, make: Callable[[], bytes]) -> Path:
        """The file of a key; ``make`` is called in one process if it is not there.

        Raises
        ------
        OSError
            The folder cannot be written.
        """
        found = self.find(key, ending)
        if found is not None:
            return found
        with self._locked(key):
            found = self.find(key, ending)
            if found is not None:
                return found
            for left_over in self.folder.glob(f"{key}.*.tmp"):
                left_over.unlink(missing_ok=True)
            body = make()
            return self._write(key, ending, body + _trailer(body))

    def files(self) -> list[Path]:
        """Compiled kernels in the folder."""
        return sorted(p for p in self.folder.glob("*") if p.suffix in (".cubin", ".ptx"))

    def clear(self) -> int:
        """Remove every compiled kernel; returns how many there were."""
        files = self.files()
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def _write(self, key: str, ending: str, content: bytes) -> Path:
        path = self.folder / f"{key}{ending}"
        handle, name = tempfile.mkstemp(prefix=f"{key}.", suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return path

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        path = self.folder / f"{key}.lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Without locks (some network file systems) each process compiles; still never torn.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
            # Whoever waits on this file finds the kernel that it was locked for.
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _trailer(body: bytes) -> bytes:
    return _TRAILER % hashlib.sha256(body).hexdigest().encode()


_private: dict[int, Path] = {}


def cubin_cache() -> CubinCache:
    """The cache to use: the configured folder, or this process's own where that cannot be."""
    try:
        folder = env.cache_dir() or env.default_cache_dir()
        reason = why_not_private(folder)
        if not reason:
            return CubinCache(folder)
    except RuntimeError as error:
        reason = f"there is no home folder ({error})"
    return private_cache(reason)


def private_cache(reason: str) -> CubinCache:
    """The cache of this process alone, gone when it ends; warns once, with the reason."""
    pid = os.getpid()
    if pid not in _private:
        _private[pid] = Path(tempfile.mkdtemp(prefix="cupyflash-"))
        atexit.register(_remove, pid, _private[pid])
        warnings.warn(
            f"kernels are compiled again in each process, because {reason}; set "
            "CUPYFLASH_CACHE_DIR to a folder of your own",
            RuntimeWarning,
            stacklevel=2,
        )
    return CubinCache(_private[pid])


def why_not_private(folder: Path) -> str:
    """Why a folder cannot hold kernels that this user will run; empty if it can. Makes it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        link, found = folder.lstat(), folder.stat()
    except OSError as error:
        return f"{folder} cannot be made ({error})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    user = os.geteuid()
    for owner in (link.st_uid, found.st_uid):
        if owner != user:
            return f"{folder} belongs to user {owner}, not to {user}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {folder} (mode {stat.S_IMODE(found.st_mode):o})"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return f"{folder} cannot be written"
    return ""


def _remove(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
