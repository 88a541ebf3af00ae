"""Collectives on NumPy arrays over any exchange of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .communicator import DisagreementError

__all__ = ["HostCommunicator"]


class HostCommunicator(ABC):
    """Collectives on NumPy arrays; a subclass moves the bytes.

    Every message starts with what its sender is about to do, so ranks that disagree find out in
    the same collective.

    Parameters
    ----------
    rank, size : int
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} must be one of size={size}")
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @abstractmethod
    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Message ``i`` goes to rank ``i``; what came in, by sender.

        Raises
        ------
        RankLostError
            A rank failed, or did not come in time.
        """

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """Let every other rank fail instead of waiting for this one."""

    def all_gather(self, send: NDArray[Any]) -> NDArray[Any]:
        _check_here(send)
        rows = np.broadcast_to(send, (self.size, *send.shape))
        return self._swap("all_gather", [rows])[0]

    def all_to_all(self, sends: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return self._swap("all_to_all", sends)

    def reduce_scatter(self, send: NDArray[Any]) -> NDArray[Any]:
        if send.dtype != np.float32:
            raise TypeError(f"send is {send.dtype}; sums over ranks are of float32")
        found = self._swap("reduce_scatter", [send])[0]
        total: NDArray[Any] = found[0].copy()
        for part in found[1:]:
            total += part
        return total

    def beside(self, work: Callable[[], Any]) -> Callable[[], None]:
        work()
        return _nothing

    def synchronize(self) -> None:
        _nothing()

    def agree(self, what: str, state: bytes) -> None:
        head = what.encode() + b"\0"
        found = self.exchange([head + state] * self.size)
        differ = [rank for rank, message in enumerate(found) if message != head + state]
        if differ:
            raise DisagreementError(
                f"{what} of rank {self.rank} is not that of ranks {differ}; all ranks must run the "
                "same step"
            )

    def _swap(self, what: str, sends: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        for send in sends:
            _check_here(send)
            if send.ndim < 1 or send.shape[0] != self.size:
                raise ValueError(f"send has shape {send.shape}; its first axis must be {self.size}")
        head = f"{what} {[(send.shape, send.dtype.name) for send in sends]}".encode() + b"\0"
        messages = [
            head + b"".join(np.ascontiguousarray(send[rank]).tobytes() for send in sends)
            for rank in range(self.size)
        ]
        found = self.exchange(messages)
        for rank, message in enumerate(found):
            if not message.startswith(head):
                other = message.partition(b"\0")[0].decode(errors="replace")
                raise DisagreementError(
                    f"rank {self.rank} calls {head[:-1].decode()}, rank {rank} {other}"
                )
        bodies = [memoryview(message)[len(head) :] for message in found]
        received, start = [], 0
        for send in sends:
            count = int(np.prod(send.shape[1:]))
            end = start + count * send.itemsize
            parts = [np.frombuffer(body[start:end], np.uint8) for body in bodies]
            whole = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
            received.append(whole.view(send.dtype).reshape(send.shape))
            start = end
        return received


def _nothing() -> None:
    """What NumPy computes is done."""


def _check_here(send: Any) -> None:
    if not isinstance(send, np.ndarray):
        raise TypeError(
            f"send is {type(send).__name__}; this communicator moves NumPy arrays, use "
            "NcclCommunicator on a GPU"
        )
