"""What attention calls of equal shapes, strides and options share, made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from .problem import AttentionProblem

__all__ = ["Layout"]

T = TypeVar("T")
_MOST_KEPT = 64


class Layout:
    """A described call without its arrays: no memory, no address.

    Attributes
    ----------
    problem : AttentionProblem
    specs : tuple
        Shape, dtype and strides (bytes) of each of `arrays.AttentionArrays`, or None.
    scales : tuple
        For q, k and v: None, a number, or the spec of an array.
    out_shape, lse_shape : tuple of int
        Of the results.
    kept : dict
        What was made for such calls; look here first, then `keep`.
    """

    __slots__ = ("kept", "lse_shape", "out_shape", "problem", "scales", "specs")

    def __init__(
        self, problem: AttentionProblem, specs: tuple[Any, ...], scales: tuple[Any, ...]
    ) -> None:
        self.problem, self.specs, self.scales = problem, specs, scales
        self.out_shape = problem.total_q, problem.num_heads_q, problem.head_dim_v
        self.lse_shape = problem.num_heads_q, problem.total_q
        self.kept: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """Make something once. It must depend on the layout and the key alone."""
        found = make()
        if len(self.kept) >= _MOST_KEPT:
            self.kept.clear()
        # Of two threads that make the same, both go on with the first one's.
        return self.kept.setdefault(key, found)  # type: ignore[no-any-return]
