"""Run the benchmark: every provider on every case, on the current GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .case import BenchCase
from .cases import bench_cases
from .inputs import BenchInputs
from .peers import PEERS, prepare_peer
from .providers import NoKernelError, cupyflash
from .roofs import Roofs, floor_seconds, roofs_here
from .timing import Prepared, host_seconds, interleave, prepare

__all__ = ["run_bench"]


def run_bench(
    only: str = "",
    providers: Sequence[str] = ("cupyflash",),
    peers_folder: Path | None = None,
    roofs: Roofs | None = None,
) -> Iterator[dict[str, Any]]:
    """Time each case; yields one row as soon as it is done.

    Parameters
    ----------
    only : str
        Comma-separated parts of case names; all cases when empty.
    providers : sequence of str
        ``cupyflash`` and any of ``PEERS``.
    peers_folder : Path, optional
        Where the peers' shared objects lie.
    roofs : Roofs, optional
        Of this GPU; those of `roofs_here` if None.

    Yields
    ------
    dict
        ``case``, ``floor_us``, ``us`` and ``host_us`` per provider, and ``skipped`` with reasons.
    """
    roofs = roofs_here()[0] if roofs is None else roofs
    for case in bench_cases(only):
        # Enough copies of the inputs that the 60 MB of L2 hold none of them.
        copies = max(1, min(4, int(2e8 / max(case.bytes_moved, 1)) + 1))
        inputs = [BenchInputs(case, seed) for seed in range(copies)]
        yield _time_case(case, inputs, providers, peers_folder, roofs)
        _free_memory(inputs)


def _time_case(
    case: BenchCase,
    inputs: list[BenchInputs],
    providers: Sequence[str],
    folder: Path | None,
    roofs: Roofs,
) -> dict[str, Any]:
    prepared: dict[str, Prepared] = {}
    host: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name in providers:
        try:
            if case.step and name != "cupyflash":
                raise NoKernelError("a step of cupyflash beside itself")
            calls = [
                cupyflash(i) if name == "cupyflash" else PEERS[name](i, folder) for i in inputs
            ]
            host[name] = host_seconds(calls[0]) * 1e6
            prepared[name] = (prepare if name == "cupyflash" else prepare_peer)(calls)
        except (NoKernelError, NotImplementedError) as reason:
            skipped[name] = str(reason)
        except Exception as error:  # a peer that fails must not end the run of the others
            if name == "cupyflash":
                raise
            skipped[name] = f"{type(error).__name__}: {error}"[:160]
    seconds = interleave(prepared) if prepared else {}
    return {
        "case": case.name,
        "floor_us": floor_seconds(roofs, case) * 1e6,
        "flops": case.flops,
        "bytes": case.bytes_moved,
        "us": {name: value * 1e6 for name, value in seconds.items()},
        "host_us": host,
        "skipped": skipped,
    }


def _free_memory(inputs: list[BenchInputs]) -> None:
    import cupy as cp

    inputs.clear()
    cp.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()
