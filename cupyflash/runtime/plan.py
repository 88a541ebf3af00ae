"""A launch decided from bounds alone: pure arithmetic, no array is read, no CuPy."""

from __future__ import annotations

from dataclasses import dataclass, field

from .variant import Variant

__all__ = ["LARGEST_WORKSPACE", "Plan"]

LARGEST_WORKSPACE = 1 << 28
"""Bytes that a plan takes for splitting keys where the caller names no limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one kernel is launched.

    Attributes
    ----------
    variant : Variant
    grid, block : tuple of int
        Blocks and threads in x, y, z.
    smem_bytes : int
        Dynamic shared memory a block.
    workspace_bytes : int
        Device scratch that the launch needs; 0 for none.
    programmatic : bool
        Blocks may start while the kernel before it in the stream still runs, if that lets them: the
        kernel must wait (``griddepcontrol.wait``, 9.0 and later) before it touches memory.
    shape : tuple of int
        Grid, block and shared memory, as the driver takes them.
    """

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int = 0
    workspace_bytes: int = 0
    programmatic: bool = False
    shape: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (*self.grid, *self.block, self.smem_bytes))
        # One object for equal variants: a launch then finds its kernel without comparing them.
        object.__setattr__(self, "variant", _variants.setdefault(self.variant, self.variant))


_variants: dict[Variant, Variant] = {}
