"""Metadata at fixed addresses, so that a captured step reads what the next build wrote."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.arrays import array_module
from cupyflash.scheduler_metadata import SchedulerMetadata

__all__ = ["GraphBuffers"]

Array = Any  # NumPy or CuPy


class GraphBuffers:
    """Named int32 arrays that keep their address from build to build.

    What lies past the values of the last build is 0: a captured launch over more requests than
    this step has finds no work there.

    Parameters
    ----------
    max_rows : int
        Most requests of a captured step, padding included.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._arrays: dict[str, Array] = {}
        self._captured = False

    def captured(self) -> None:
        """From now on no array may move: a graph holds its address."""
        self._captured = True

    def rows(self, name: str, values: Array) -> Array:
        """A copy of ``values`` [n] at the address of this name; at most ``max_rows`` + 1."""
        return self._store(name, values, self.max_rows + 1)

    def schedule(self, name: str, metadata: SchedulerMetadata) -> SchedulerMetadata:
        """The same schedule at the address of this name."""
        usual = 1 + 4 * (-(-self.max_rows // 4) * 4)  # four words a request and a counter
        return SchedulerMetadata(self._store(name, metadata.buffer, usual), metadata.bounds)

    def _store(self, name: str, values: Array, size: int) -> Array:
        count = values.shape[0]
        buffer = self._arrays.get(name)
        if buffer is None or buffer.shape[0] < count:
            if buffer is not None and self._captured:
                raise ValueError(
                    f"{name} needs {count} entries, but captured graphs hold the address of "
                    f"{buffer.shape[0]}; capture the largest step first, or raise max_num_seqs"
                )
            buffer = self._arrays[name] = array_module(values).zeros(max(size, count), np.int32)
        buffer[:count] = values
        buffer[count:] = 0
        return buffer[:count]
