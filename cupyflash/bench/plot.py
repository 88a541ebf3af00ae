"""A picture of a benchmark run: how much of the roof each case reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot"]


def plot(path: Path, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw one bar a case and provider.

    Parameters
    ----------
    path : Path
        What to write; its ending is the format.
    about : mapping
        The header of the run.
    rows : sequence of mapping
        As `run_bench` yields them.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    providers = list(dict.fromkeys(name for row in rows for name in row["us"]))
    height = 0.8 / max(1, len(providers))
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(providers):
        timed = [(y, row) for y, row in enumerate(rows) if name in row["us"]]
        axes.barh(
            [y + i * height for y, _ in timed],
            [100 * row["floor_us"] / row["us"][name] for _, row in timed],
            height,
            align="edge",
            label=name,
        )
    axes.set_yticks([y + 0.4 for y in range(len(rows))], [row["case"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("share of the roof, %")
    axes.set_title(f"{about['gpu']}, cupyflash {about['commit']}", fontsize=9)
    axes.axvline(100, color="grey", linewidth=0.5)
    if providers:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
