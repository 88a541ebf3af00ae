"""Kernels that read, convert and write rows of (token, head): variants, plans, launches.

Threads x run along a row, y over heads, z over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .device import Device
from .dtypes import ScalarType
from .launch import launch, stream_handle
from .params import KernelArgs, ParamsLayout
from .plan import Plan
from .recording import recorded
from .variant import Variant

__all__ = ["RowKernel", "RowShape"]

_MOST_LAUNCHES = 1024


@dataclass(frozen=True)
class RowKernel:
    """One source file, a variant for each pair of types.

    Attributes
    ----------
    source : str
    params : ParamsLayout
    threads, thread_tokens, thread_accesses : int
        Of a block; tokens that a thread takes; accesses of a thread to a row, one after the other.
    tile_tokens : int
        Tokens of a block where the heads fill it.
    sides : int
        Blocks in z.
    """

    source: str
    params: ParamsLayout
    threads: int
    thread_tokens: int
    thread_accesses: int
    tile_tokens: int
    sides: int

    @cached_property
    def name(self) -> str:
        return self.source.removesuffix(".cu")

    def variant(self, arch: str, in_type: ScalarType, out_type: ScalarType) -> Variant:
        return Variant(
            self.source,
            f"{self.name}_{in_type.name}_{out_type.name}",
            arch,
            (
                ("IN_TYPE", in_type.code),
                ("OUT_TYPE", out_type.code),
                ("PARAMS_NBYTES", self.params.nbytes),
            ),
        )

    def plan(
        self,
        arch: str,
        in_type: ScalarType,
        out_type: ScalarType,
        tokens: int,
        heads: int,
        head_dim: int,
        vectorised: bool,
    ) -> Plan:
        """Grid ``(token tiles, head tiles, sides)``; empty where there is nothing to do."""
        variant = self.variant(arch, in_type, out_type)
        if not tokens * heads * head_dim:
            return Plan(variant, (0, 1, 1), (1, 1, 1))
        (tiles, head_tiles), block = _row_block(
            self.threads,
            tokens,
            heads,
            -(-_row_steps(head_dim, in_type.itemsize, vectorised) // self.thread_accesses),
            thread_tokens=self.thread_tokens,
            tile_tokens=self.tile_tokens,
        )
        grid = (tiles, head_tiles, self.sides)
        return Plan(variant, grid, block, programmatic=int(arch.removeprefix("sm_")) >= 90)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What calls of equal shapes, types and strides have in common; pairs are narrow, wide.

    Attributes
    ----------
    plans : tuple of Plan
    tails : tuple of bytes
        Of the params: what does not depend on addresses.
    strides_allow_wide : bool
    out_alignment : int
        Of what is written, for wide accesses; 16 of what is read.
    launches : dict
        What was queued, by device, stream and values.
    """

    params: ParamsLayout
    plans: tuple[Plan, Plan]
    tails: tuple[bytes, bytes]
    strides_allow_wide: bool
    out_alignment: int
    launches: dict[Any, Callable[[], bool]] = field(default_factory=dict, compare=False)

    def queue(
        self,
        device: Device,
        arrays: tuple[Any, ...],
        read: int,
        written: int,
        values: tuple[Any, ...],
        stream: Any,
    ) -> None:
        """Queue one launch.

        Parameters
        ----------
        arrays : tuple
            All that the launch may touch.
        read, written : int
            The addresses of the rows on either side, joined by ``|``.
        values : tuple
            The params in front of the tail.

        Raises
        ------
        CaptureError, CompileError
            As `compile.load_kernel`.
        """
        queue = device.current_stream() if stream is None else stream_handle(stream)
        place = (device, queue, values)
        again = self.launches.get(place)
        if again is not None and again():
            return
        wide = self.strides_allow_wide and not read % 16 and not written % self.out_alignment
        packed = self.params.pack_head(self.tails[wide], *values)
        args = KernelArgs((packed,), arrays)
        if not hasattr(device, "ready"):
            launch(device, self.plans[wide], args, queue)
            return
        recording = recorded(launch, device, self.plans[wide], args, queue)
        if len(self.launches) >= _MOST_LAUNCHES:
            self.launches.clear()
        self.launches[place] = recording.queue


def _row_block(
    threads: int, tokens: int, heads: int, steps: int, *, thread_tokens: int, tile_tokens: int
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Grid ``(token tiles, head tiles)`` and block, of at most ``threads`` threads.

    A row takes ``steps`` threads, one after the other if they are too many; a thread takes
    ``thread_tokens`` tokens. A block covers about ``tile_tokens`` if the heads fill it, and more
    if they do not.
    """
    x = min(steps, threads)
    rows = threads // x
    z = min(rows, -(-min(tile_tokens, tokens) // thread_tokens))
    y = min(heads, rows // z)
    z = min(rows // y, -(-tokens // thread_tokens), 64)
    return (-(-tokens // (z * thread_tokens)), -(-heads // y)), (x, y, z)


def _row_steps(head_dim: int, itemsize: int, vectorised: bool) -> int:
    """Accesses to a row: 16 bytes each, or one element."""
    return max(1, head_dim * itemsize // 16) if vectorised else head_dim
