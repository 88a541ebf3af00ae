"""Collectives on NumPy arrays over MPI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .communicator import RankLostError
from .host import HostCommunicator

__all__ = ["MpiCommunicator"]

_PAUSE = 5e-5  # seconds between looks at what has come


class MpiCommunicator(HostCommunicator):
    """The ranks of an MPI communicator, through mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        ``MPI.COMM_WORLD`` if None. Its messages must be this object's alone: pass ``comm.Dup()``
        where others use it too.
    timeout : float
        Seconds to wait for the other ranks in one collective.

    Raises
    ------
    ImportError
        mpi4py is not installed.
    """

    def __init__(self, comm: Any = None, timeout: float = 60.0) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD if comm is None else comm
        self._timeout = timeout
        super().__init__(self._comm.Get_rank(), self._comm.Get_size())

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        sizes = np.array([len(message) for message in messages], np.int64)
        incoming = np.empty_like(sizes)
        self._wait([self._comm.Ialltoall(sizes, incoming)])
        buffers = [np.empty(int(size), np.uint8) for size in incoming]
        requests = [self._comm.Irecv(buffer, rank) for rank, buffer in enumerate(buffers)]
        requests += [
            self._comm.Isend(np.frombuffer(message, np.uint8), rank)
            for rank, message in enumerate(messages)
        ]
        self._wait(requests)
        return [buffer.tobytes() for buffer in buffers]

    def abort(self, reason: str = "") -> None:
        """End all ranks: MPI has no way to let the others go on."""
        self._comm.Abort(1)

    def _wait(self, requests: list[Any]) -> None:
        end = time.monotonic() + self._timeout
        while not self._mpi.Request.Testall(requests):
            if time.monotonic() > end:
                for request in requests:
                    request.Cancel()
                raise RankLostError(
                    f"rank {self.rank} waited {self._timeout:g} s for the other ranks of an MPI "
                    f"group of {self.size}"
                )
            time.sleep(_PAUSE)
