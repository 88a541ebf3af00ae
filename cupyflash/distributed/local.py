"""Ranks as threads or processes of one machine on NumPy arrays, for tests and trials."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from itertools import combinations
from multiprocessing.connection import Connection
from typing import Any

from .communicator import RankLostError
from .host import HostCommunicator
from .spawn import gather_results, run_rank

__all__ = ["ProcessCommunicator", "ThreadCommunicator", "run_processes", "run_threads"]


class ThreadCommunicator(HostCommunicator):
    """A rank that is a thread; see `run_threads`.

    Attributes
    ----------
    sent : list of (str, int, int)
        What each message was, whom it went to, and how many bytes it had beside its head.
    """

    def __init__(self, rank: int, boxes: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(boxes))
        self._boxes, self._barrier = boxes, barrier
        self.sent: list[tuple[str, int, int]] = []

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        for peer, message in enumerate(messages):
            head, _, body = message.partition(b"\0")
            if peer != self.rank:
                self.sent.append((head.decode().partition(" ")[0], peer, len(body)))
        self._boxes[self.rank] = list(messages)
        try:
            self._barrier.wait()
            found = [box[self.rank] for box in self._boxes]
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLostError(f"rank {self.rank} lost the others of {self.size}") from None
        return found

    def abort(self, reason: str = "") -> None:
        self._barrier.abort()


class ProcessCommunicator(HostCommunicator):
    """A rank that is a process; see `run_processes`.

    Parameters
    ----------
    rank : int
    peers : sequence of Connection or None
        To each rank; None for this one.
    timeout : float
        Seconds to wait for the other ranks in one collective.
    """

    def __init__(self, rank: int, peers: Sequence[Connection | None], timeout: float) -> None:
        super().__init__(rank, len(peers))
        self._peers, self._timeout = list(peers), timeout

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        sender = threading.Thread(target=self._send, args=(messages,), daemon=True)
        sender.start()
        found = [
            messages[self.rank] if peer is None else self._receive(rank, peer)
            for rank, peer in enumerate(self._peers)
        ]
        sender.join(self._timeout)
        return found

    def _send(self, messages: Sequence[bytes]) -> None:
        for peer, message in zip(self._peers, messages, strict=True):
            if peer is not None:
                try:
                    peer.send_bytes(message)
                except OSError:
                    return  # it is gone; receiving says so

    def _receive(self, rank: int, peer: Connection) -> bytes:
        try:
            if peer.poll(self._timeout):
                return peer.recv_bytes()
            reason = f"did not come within {self._timeout:g} s"
        except (EOFError, OSError):
            reason = "is gone"
        self.abort()
        raise RankLostError(f"rank {rank} {reason}, says rank {self.rank} of {self.size}")

    def abort(self, reason: str = "") -> None:
        for peer in self._peers:
            if peer is not None:
                peer.close()


def run_threads(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """``function(communicator, *args)`` on every rank, as threads: what each returned.

    Raises
    ------
    RankLostError
        A rank failed; every rank's outcome is in ``outcomes``, the first error its cause.
    """
    barrier = threading.Barrier(size, timeout=timeout)
    boxes: list[Any] = [None] * size
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        outcomes[rank] = run_rank(ThreadCommunicator(rank, boxes, barrier), function, args)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return gather_results(outcomes)


def run_processes(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """The same with processes; function, arguments and results must pickle."""
    from .spawn import spawn_processes

    context = multiprocessing.get_context("spawn")
    ends: list[list[Connection | None]] = [[None] * size for _ in range(size)]
    for one, other in combinations(range(size), 2):
        ends[one][other], ends[other][one] = context.Pipe()
    outcomes = spawn_processes(
        _process_rank, [(rank, ends[rank], timeout, function, args) for rank in range(size)],
        timeout, close=[end for row in ends for end in row if end is not None],
    )  # fmt: skip
    return gather_results(outcomes)


def _process_rank(
    rank: int,
    peers: Sequence[Connection | None],
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    return run_rank(ProcessCommunicator(rank, peers, timeout), function, args)
