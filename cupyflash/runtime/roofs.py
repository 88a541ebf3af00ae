"""What the memory and the tensor cores of a GPU reach at most, where it was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["H200", "Roofs", "roofs_of"]


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes a second and FLOPs a second.

    Attributes
    ----------
    read, copy : float
        A read-only stream; a copy, counting bytes read and bytes written.
    dense16, dense8 : float
        Dense matrix products of 16-bit and 8-bit operands.
    """

    read: float
    copy: float
    dense16: float
    dense8: float

    def as_dict(self) -> dict[str, float]:
        """The rates by name."""
        return asdict(self)

    def seconds(self, nbytes: int, flops: int, eight_bit: bool) -> float:
        """No kernel that moves these bytes and does these FLOPs is much faster."""
        return max(nbytes / self.read, flops / (self.dense8 if eight_bit else self.dense16))


H200 = Roofs(read=4.54e12, copy=4.31e12, dense16=780e12, dense8=1398e12)
"""Measured on one H200: read-only stream, device copy, 8192³ matrix products on random data."""


def roofs_of(name: str) -> Roofs | None:
    """The roofs of a GPU by its name; None where none were measured."""
    return H200 if "H200" in name else None
