"""How much of the allowed error a result uses, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash.testing import Case
from cupyflash.testing.rounding import half_ulp

__all__ = ["margin", "plot_margins"]


def margin(case: Case, xp: Any, attention: Any) -> dict[str, Any]:
    """Errors of one case.

    Parameters
    ----------
    case : Case
    xp : module
        ``numpy`` or ``cupy``.
    attention : callable
        ``flash_attn_varlen_func``, or one with its arguments.

    Returns
    -------
    dict
        ``types`` (of q and of k and v), ``case``, ``error`` and ``baseline`` (the largest of out),
        and ``share``: the error over its bound, 1 at most.

    Raises
    ------
    AssertionError
        It is out of bounds.
    """
    inputs = case.make(xp)
    expected = inputs.expected(**inputs.precision())
    out, lse = inputs.call(attention)
    expected.check(out, lse)
    rows = slice(0, sum(case.q_lens))
    right = expected.out[rows]
    error = np.abs(out[rows].astype(np.float64) - right).max(initial=0.0)
    baseline = np.abs(np.asarray(expected.out_baseline[rows], np.float64) - right).max(initial=0.0)
    ulp = half_ulp(float(np.abs(right).max(initial=0.0)), out.dtype)
    bound = 2 * baseline + ulp + expected.out_floor
    return {
        "types": case.q_type if case.q_type == case.kv_type else f"{case.q_type} / {case.kv_type}",
        "case": str(case),
        "error": float(error),
        "baseline": float(baseline),
        "share": float(error / bound) if bound else 0.0,
    }


def plot_margins(path: Path, title: str, margins: Sequence[Mapping[str, Any]]) -> None:
    """Shares of the bound, a column a type, a point a case.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(found["types"] for found in margins))
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for column, kind in enumerate(kinds):
        shares = sorted(found["share"] for found in margins if found["types"] == kind)
        spread = np.linspace(-0.3, 0.3, len(shares)) if len(shares) > 1 else [0.0]
        axes.plot([column + x for x in spread], shares, ".", markersize=4)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds, fontsize=8)
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("error / bound")
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=120)
