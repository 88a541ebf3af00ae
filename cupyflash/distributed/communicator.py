"""What context parallelism asks of a communicator, whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Communicator", "DisagreementError", "RankLostError"]

Array = Any  # NumPy or CuPy


class DisagreementError(ValueError):
    """Ranks called the same collective with different arguments; raised on all of them."""


class RankLostError(RuntimeError):
    """A rank failed, left, or did not come within the timeout; raised on all that are left."""


class Communicator(Protocol):
    """A group of ranks that call the same collectives in the same order.

    Arrays are where the implementation computes: NumPy's on the host, CuPy's on this rank's GPU,
    where work is queued on the current stream. After an error a communicator is of no more use.

    Attributes
    ----------
    rank, size : int
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, send: Array) -> Array:
        """Every rank's array [...]: [size, ...], in the order of ranks."""

    def all_to_all(self, sends: Sequence[Array]) -> list[Array]:
        """Of each array [size, ...], row ``i`` goes to rank ``i``; what came in, by sender.

        All arrays travel together.
        """

    def reduce_scatter(self, send: Array) -> Array:
        """The sum over ranks of row ``rank`` of [size, ...], float32; the same bits every time."""

    def beside(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Queue work that runs beside the collectives that follow.

        Returns
        -------
        callable
            Lets the current stream wait for the work; to be called before its results are read.
        """

    def synchronize(self) -> None:
        """Wait on the host for the current stream, at most the communicator's timeout.

        Raises
        ------
        RankLostError
            A collective of the stream waits for a rank that does not come.
        """

    def agree(self, what: str, state: bytes) -> None:
        """Return if all ranks gave the same state.

        Waits for the other ranks on the host, at most the communicator's timeout.

        Raises
        ------
        DisagreementError
            Another rank gave another state; names the ranks.
        RankLostError
            A rank did not come.
        """

    def abort(self, reason: str = "") -> None:
        """Let every other rank fail instead of waiting for this one."""
