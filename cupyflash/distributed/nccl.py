"""Collectives on this rank's GPU over NCCL, through CuPy."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .communicator import DisagreementError, RankLostError

__all__ = ["NcclCommunicator"]

Array = Any  # CuPy

_PAUSE = 2e-5  # seconds between looks at what has come


class NcclCommunicator:
    """The ranks of an NCCL communicator, one GPU each.

    Collectives are queued on the current stream and can be captured. Arrays move as bytes, so any
    dtype will do; sums are of float32.

    With ``NCCL_GRAPH_MIXING_SUPPORT=0`` in the environment captured collectives take less time, and
    NCCL allows no two replays, nor a replay and other collectives, at once. `agree` then waits for
    what is on the current stream; that replays follow one another is the host's part.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        As the host has it; see `create`, `from_mpi` and `spawn` for others.
    timeout : float
        Seconds to wait for the other ranks: here, where all of them meet once, in `agree` and in
        `synchronize`. A host that waits for a stream by itself waits for lost ranks too.

    Raises
    ------
    ImportError
        CuPy finds no NCCL.
    RankLostError
        Not all ranks came.
    """

    def __init__(self, comm: Any, timeout: float = 60.0) -> None:
        self._nccl, self.comm, self.timeout = load_nccl(), comm, timeout
        self._rank, self._size = int(comm.rank_id()), int(comm.size())
        import cupy

        self._cp = cupy
        self._stream, self._side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._seen = cupy.zeros((self._size, 4), np.int64)
        self._mixing = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT", "1") != "0"
        _within(timeout, self._meet)

    @classmethod
    def create(
        cls, size: int, unique_id: tuple[int, ...], rank: int, timeout: float = 60.0
    ) -> NcclCommunicator:
        """Join a group of ``size`` ranks on the current device.

        Parameters
        ----------
        size, rank : int
        unique_id : tuple
            `cupy.cuda.nccl.get_unique_id()` of one of the ranks.
        timeout : float
            Seconds to wait for the others, here too.

        Raises
        ------
        RankLostError
            Not all ranks came.
        """
        nccl = load_nccl()
        comm = _within(timeout, lambda: nccl.NcclCommunicator(size, unique_id, rank))
        return cls(comm, timeout)

    @classmethod
    def from_mpi(cls, comm: Any = None, timeout: float = 60.0) -> NcclCommunicator:
        """A group of the ranks of an MPI communicator (``MPI.COMM_WORLD`` if None)."""
        from mpi4py import MPI

        world = MPI.COMM_WORLD if comm is None else comm
        own = load_nccl().get_unique_id() if world.Get_rank() == 0 else None
        return cls.create(world.Get_size(), world.bcast(own), world.Get_rank(), timeout)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_gather(self, send: Array) -> Array:
        send = self._contiguous(send)
        found = self._cp.empty((self.size, *send.shape), send.dtype)
        self.comm.allGather(
            send.data.ptr, found.data.ptr, send.nbytes, self._nccl.NCCL_UINT8, self._current()
        )
        return found

    def all_to_all(self, sends: Sequence[Array]) -> list[Array]:
        pairs = []
        for send in sends:
            if send.ndim < 1 or send.shape[0] != self.size:
                raise ValueError(f"send has shape {send.shape}; its first axis must be {self.size}")
            send = self._contiguous(send)
            pairs.append((send, self._cp.empty_like(send)))
        stream, kind = self._current(), self._nccl.NCCL_UINT8
        self._nccl.groupStart()
        try:
            for send, found in pairs:
                row = send.nbytes // self.size
                for peer in range(self.size if row else 0):
                    self.comm.send(send.data.ptr + peer * row, row, kind, peer, stream)
                    self.comm.recv(found.data.ptr + peer * row, row, kind, peer, stream)
        finally:
            self._nccl.groupEnd()
        return [found for _, found in pairs]

    def reduce_scatter(self, send: Array) -> Array:
        if send.dtype != np.float32:
            raise TypeError(f"send is {send.dtype}; sums over ranks are of float32")
        send = self._contiguous(send)
        found = self._cp.empty(send.shape[1:], np.float32)
        self.comm.reduceScatter(
            send.data.ptr, found.data.ptr, found.size, self._nccl.NCCL_FLOAT32,
            self._nccl.NCCL_SUM, self._current(),
        )  # fmt: skip
        return found

    def synchronize(self) -> None:
        stream = self._cp.cuda.get_current_stream()
        self._wait(stream.record(self._cp.cuda.Event(disable_timing=True)))

    def beside(self, work: Callable[[], Any]) -> Callable[[], None]:
        main = self._cp.cuda.get_current_stream()
        self._side.wait_event(main.record(self._cp.cuda.Event(disable_timing=True)))
        with self._side:
            work()
            done = self._side.record(self._cp.cuda.Event(disable_timing=True))
        return lambda: main.wait_event(done)

    def agree(self, what: str, state: bytes) -> None:
        digest = hashlib.blake2b(what.encode() + b"\0" + state, digest_size=32).digest()
        own = np.frombuffer(digest, np.int64)
        if not self._mixing:
            current = self._cp.cuda.get_current_stream()
            self._stream.wait_event(current.record(self._cp.cuda.Event(disable_timing=True)))
        with self._stream:
            mine = self._cp.asarray(own)
            self.comm.allGather(
                mine.data.ptr, self._seen.data.ptr, mine.nbytes, self._nccl.NCCL_UINT8,
                self._stream.ptr,
            )  # fmt: skip
            done = self._stream.record()
            self._wait(done)
            seen = self._seen.get()
        differ = [rank for rank in range(self.size) if (seen[rank] != own).any()]
        if differ:
            raise DisagreementError(
                f"{what} of rank {self.rank} is not that of ranks {differ}; all ranks must run the "
                "same step"
            )

    def abort(self, reason: str = "") -> None:
        """Stop this rank's collectives; the others notice by their timeout."""
        self.comm.abort()

    def _meet(self) -> None:
        """Every collective once: in its first NCCL connects ranks, and the host waits for them."""
        with self._stream:
            rows = self._cp.zeros((self._size, 1), np.float32)
            self.all_gather(rows[0])
            self.all_to_all([rows])
            self.reduce_scatter(rows)
            self._stream.synchronize()

    def _wait(self, event: Any) -> None:
        end = time.monotonic() + self.timeout
        while not event.done:
            self.comm.check_async_error()
            if time.monotonic() > end:
                self.abort()
                raise RankLostError(
                    f"rank {self.rank} waited {self.timeout:g} s for the other ranks of an NCCL "
                    f"group of {self.size}"
                )
            time.sleep(_PAUSE)

    def _contiguous(self, array: Array) -> Array:
        if isinstance(array, np.ndarray):
            raise TypeError(
                "send is a NumPy array; NCCL moves arrays of a GPU, use MpiCommunicator for these"
            )
        return self._cp.ascontiguousarray(array)

    def _current(self) -> int:
        return int(self._cp.cuda.get_current_stream().ptr)


def load_nccl() -> Any:
    """CuPy's NCCL module.

    Raises
    ------
    ImportError
        NCCL is missing; says what to install.
    """
    from cupy.cuda import nccl

    if not nccl.available:
        raise ImportError(
            "CuPy finds no NCCL; run: pip install 'cupyflash[nccl]', or [nccl12] beside CUDA 12"
        )
    return nccl


def _within(timeout: float, join: Callable[[], Any]) -> Any:
    """What ``join`` returns; it blocks in NCCL, so it is waited for from outside."""
    import cupy

    device = cupy.cuda.Device().id
    found: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            with cupy.cuda.Device(device):
                found.append((join(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        raise RankLostError(f"not all ranks joined the NCCL group within {timeout:g} s")
    comm, error = found[0]
    if error is not None:
        raise error
    return comm
