"""Starting ranks on one machine and collecting what became of them."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .communicator import Communicator, RankLostError

__all__ = ["Outcome", "gather_results", "run_rank", "spawn", "spawn_processes"]


class Outcome(NamedTuple):
    """What became of a rank.

    Attributes
    ----------
    result : object
    error : str
        The name of what it raised; empty if it returned.
    text : str
        Message and traceback.
    """

    result: Any = None
    error: str = ""
    text: str = ""


def run_rank(
    communicator: Communicator, function: Callable[..., Any], args: tuple[Any, ...]
) -> Outcome:
    """Run a rank's part; if it fails the others are told."""
    try:
        return Outcome(function(communicator, *args))
    except BaseException as error:
        communicator.abort(str(error))
        return Outcome(None, type(error).__name__, f"{error}\n{traceback.format_exc()}")


def gather_results(outcomes: Sequence[Outcome | None]) -> list[Any]:
    """The results of all ranks.

    Raises
    ------
    RankLostError
        One failed or never ended. ``outcomes`` of the error holds what became of each.
    """
    found = [Outcome(None, "RankLostError", "it never ended") if o is None else o for o in outcomes]
    failed = [(rank, outcome) for rank, outcome in enumerate(found) if outcome.error]
    if not failed:
        return [outcome.result for outcome in found]
    # The others failed because one did: that one's words come first.
    failed.sort(key=lambda pair: pair[1].error == "RankLostError")
    rank, first = failed[0]
    error = RankLostError(
        f"{len(failed)} of {len(found)} ranks failed, first rank {rank} with {first.error}: "
        f"{first.text}"
    )
    error.outcomes = found  # type: ignore[attr-defined]
    raise error


def spawn_processes(
    target: Callable[..., Outcome],
    arguments: Sequence[tuple[Any, ...]],
    timeout: float,
    close: Sequence[Any] = (),
) -> list[Outcome | None]:
    """Run ``target`` in a process for each tuple of arguments; None for one that never ended.

    Once a rank has failed the others have ``timeout`` seconds to end.

    Parameters
    ----------
    close : sequence
        Ends of pipes that only the children may hold, or nobody would notice a rank's death.
    """
    context = multiprocessing.get_context("spawn")
    results = [context.Pipe(duplex=False) for _ in arguments]
    processes = [
        context.Process(target=_report, args=(send, target, given), daemon=True)
        for (_, send), given in zip(results, arguments, strict=True)
    ]
    for process in processes:
        process.start()
    for end in (*close, *(send for _, send in results)):
        end.close()
    outcomes: list[Outcome | None] = [None] * len(processes)
    end_at = float("inf")
    open_ranks = set(range(len(processes)))
    while open_ranks and time.monotonic() < end_at:
        for rank in list(open_ranks):
            receive = results[rank][0]
            if receive.poll(0.01 / len(open_ranks)):
                open_ranks.discard(rank)
                outcomes[rank] = _outcome_of(receive, processes[rank])
                if outcomes[rank].error and end_at == float("inf"):  # type: ignore[union-attr]
                    end_at = time.monotonic() + timeout
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
    return outcomes


def _outcome_of(receive: Any, process: Any) -> Outcome:
    try:
        found: Outcome = receive.recv()
        return found
    except EOFError:
        process.join(1.0)
        return Outcome(None, "RankLostError", f"its process ended with {process.exitcode}")


def _report(send: Any, target: Callable[..., Outcome], given: tuple[Any, ...]) -> None:
    send.send(target(*given))


def spawn(function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """``function(communicator, *args)`` on ``size`` GPUs of this machine, a process each.

    The processes have ``NCCL_GRAPH_MIXING_SUPPORT=0``, unless it is set: see `NcclCommunicator`.

    Parameters
    ----------
    function : callable
        Gets an `NcclCommunicator` first; its device is current. It, its arguments and its results
        must pickle.
    size : int
    timeout : float
        Seconds that ranks wait for each other.

    Returns
    -------
    list
        What each rank returned.

    Raises
    ------
    ImportError
        CuPy finds no NCCL.
    RankLostError
        A rank failed.
    """
    from .nccl import load_nccl

    unique_id = load_nccl().get_unique_id()
    arguments = [(rank, size, unique_id, timeout, function, args) for rank in range(size)]
    return gather_results(spawn_processes(_gpu_rank, arguments, timeout))


def _gpu_rank(
    rank: int,
    size: int,
    unique_id: tuple[int, ...],
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Outcome:
    import cupy

    from .nccl import NcclCommunicator

    # Replays of a process that was started for one group follow one another; see NcclCommunicator.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    try:
        cupy.cuda.Device(rank).use()
        group = NcclCommunicator.create(size, unique_id, rank, timeout)
    except Exception as error:
        return Outcome(None, type(error).__name__, f"{error}\n{traceback.format_exc()}")
    return run_rank(group, function, args)
