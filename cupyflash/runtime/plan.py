"""A launch decided from bounds alone: pure arithmetic, no array is read, no CuPy."""

from __future__ import annotations

from dataclasses import dataclass

from .variant import Variant

__all__ = ["Plan"]


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
    """

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        # One object for equal variants: a launch then finds its kernel without comparing them.
        object.__setattr__(self, "variant", _variants.setdefault(self.variant, self.variant))


_variants: dict[Variant, Variant] = {}
