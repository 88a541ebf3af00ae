"""The one comparison: special values first, then the bound, then the worst coordinate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .requests import to_numpy
from .rounding import half_ulp, round_to

__all__ = ["assert_within"]

Coordinate = tuple[int, ...]


def assert_within(
    actual: Any,
    oracle: Any,
    baseline: Any,
    *,
    factor: float = 2.0,
    floor: float = 0.0,
    dtype: Any = None,
    name: str = "out",
    describe: Callable[[Coordinate], str] = str,
) -> None:
    """Assert ``max|actual - oracle| <= factor * max|baseline - oracle| + half an ulp + floor``.

    NaN and infinities are compared first and must match exactly, where the oracle is first rounded
    to the type of ``actual``, so that a value past its range is expected to overflow.

    Parameters
    ----------
    actual : array [...]
        The result under test, in its storage type.
    oracle : array [...], float64
        The right values.
    baseline : array [...]
        The same maths in low precision; its largest error is the unit of the bound.
    factor : float, default 2
    floor : float, default 0
        What else rounding may cost, such as that of dot products in float32.
    dtype : dtype, optional
        The type whose ulp counts; default that of ``actual``. The ulp is taken at the largest
        finite ``|oracle|``.
    name : str
        What the message calls the array.
    describe : callable
        Turns the worst coordinate into words.

    Raises
    ------
    AssertionError
        Names the worst element, both values, the bound and its parts.
    """
    actual = to_numpy(actual)
    kind = np.dtype(dtype or actual.dtype)
    values, right = actual.astype(np.float64), np.asarray(oracle, np.float64)
    low = to_numpy(baseline).astype(np.float64)
    if not values.shape == right.shape == low.shape:
        raise AssertionError(
            f"{name}: shapes differ: actual {values.shape}, oracle {right.shape}, "
            f"baseline {low.shape}"
        )
    _assert_special(values, right, kind, name, describe)
    finite = np.isfinite(right) & np.isfinite(values)
    if not finite.any():
        return
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(values - right), 0.0)
        budget = np.where(finite & np.isfinite(low), np.abs(low - right), 0.0).max()
    ulp = float(half_ulp(np.abs(right[finite]).max(), kind))
    bound = factor * budget + ulp + floor
    if error.max() <= bound:
        return
    worst = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
    wrong = int((error > bound).sum())
    raise AssertionError(
        f"{name} at {describe(worst)} is {values[worst]:.9g}, the oracle says {right[worst]:.9g}: "
        f"off by {error[worst]:.3g}, {error[worst] / bound:.3g} times the bound {bound:.3g} "
        f"({factor:g} x baseline error {budget:.3g} + half an ulp {ulp:.3g} + floor {floor:.3g}); "
        f"{wrong} of {error.size} elements are out of bounds"
    )


def _assert_special(
    values: NDArray[np.float64],
    right: NDArray[np.float64],
    kind: np.dtype[Any],
    name: str,
    describe: Callable[[Coordinate], str],
) -> None:
    expected = round_to(right, kind).astype(np.float64)
    special = ~np.isfinite(expected) | ~np.isfinite(values)
    same = (values == expected) | (np.isnan(values) & np.isnan(expected))
    wrong = special & ~same
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name} at {describe(first)} is {values[first]}, the oracle says {right[first]}; "
            f"{int(wrong.sum())} of {wrong.size} elements have a wrong NaN or infinity"
        )
