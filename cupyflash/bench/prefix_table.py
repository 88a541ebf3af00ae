"""What a run of ``prefix_grid`` says: the table of decisions, the model's numbers, the picture.

``python -m cupyflash.bench.prefix_table grid.json --plot grid.png`` prints them as markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash.cascade_policy import prefix_features, shared_prefix_pays

__all__ = ["fit", "losses", "main", "plot", "table"]

Row = dict[str, Any]
_HEADS, _HEADS_KV, _HEAD_DIM = 32, 8, 128
_ITEMSIZE = {"bf16": 2, "e4m3": 1}


def _shape(row: Row) -> tuple[Any, ...]:
    requests, shared = row["requests"], row["shared"]
    keys = [shared + row["own"]] * requests
    return shared, [1] * requests, keys, _HEADS, _HEADS_KV, _HEAD_DIM


def _pays(row: Row, scheduled: bool) -> bool:
    width = _ITEMSIZE[row["cache"]]
    return shared_prefix_pays(*_shape(row), scheduled=scheduled, cache_itemsize=width)


def _gain(row: Row, way: str) -> float:
    """Plain decode over what the decision takes."""
    taken = way if _pays(row, way == "ahead") else "plain"
    return float(row["us"]["plain"] / row["us"][taken])


def losses(rows: Sequence[Row]) -> list[tuple[Row, str, float]]:
    """Rows and ways whose decision is slower than plain decode, and the gain."""
    found = [(row, way, _gain(row, way)) for row in rows for way in ("ahead", "inside")]
    return [one for one in found if one[2] < 1]


def table(rows: Sequence[Row]) -> str:
    """A row a point."""
    lines = [
        "| requests | shared | own | plain decode | ahead | inside | decision, gain | inside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["requests"], row["shared"], row["own"])):
        times = " | ".join(f"{row['us'][way]:.1f}" for way in ("plain", "ahead", "inside"))
        ways = " | ".join(
            f"{'shared' if _pays(row, way == 'ahead') else 'alone'}, {_gain(row, way):.2f}"
            for way in ("ahead", "inside")
        )
        lines.append(f"| {row['requests']} | {row['shared']} | {row['own']} | {times} | {ways} |")
    return "\n".join(lines)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """The numbers of the model of `predict_microseconds`: least squares of relative errors."""
    features = [prefix_features(*_shape(row), cache_itemsize=_ITEMSIZE[row["cache"]])
                for row in rows]  # fmt: skip

    def solve(columns: list[list[float]], way: str) -> list[float]:
        times = np.array([row["us"][way] for row in rows])
        scaled = np.array(columns).T / times[:, None]
        return [float(x) for x in np.linalg.lstsq(scaled, np.ones(len(times)), rcond=None)[0]]

    one = [1.0] * len(rows)
    alone = solve([one, [f.own for f in features], [f.read for f in features]], "plain")
    shared = solve(
        [one, [f.own for f in features], [f.blocks for f in features],
         [float(f.states) for f in features]], "ahead",
    )  # fmt: skip
    inside = float(np.median([row["us"]["inside"] - row["us"]["ahead"] for row in rows]))
    names = ("alone", "alone_own", "alone_shared", "launch", "own", "block", "state", "schedule")
    return dict(zip(names, (*alone, *shared, inside), strict=True))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plain decode over the kernel of shared prefixes, and what the decision makes of it."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in _ITEMSIZE if any(row["cache"] == kind for row in rows)]
    figure = Figure(figsize=(6 * len(kinds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for pays, colour in ((True, "tab:blue"), (False, "tab:grey")):
            chosen = [row for row in rows if row["cache"] == kind and _pays(row, True) is pays]
            axes.scatter(
                [row["us"]["plain"] for row in chosen],
                [row["us"]["plain"] / row["us"]["ahead"] for row in chosen],
                s=14, color=colour, label="decision: shared" if pays else "decision: alone",
            )  # fmt: skip
        axes.axhline(1, color="black", linewidth=0.6)
        axes.set(xscale="log", yscale="log", xlabel="plain decode, us", title=f"{kind} cache",
                 ylabel="plain decode over shared")  # fmt: skip
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, the fits and what the decisions lose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    rows: list[Row] = json.loads(given.json.read_text())
    for kind in _ITEMSIZE:
        chosen = [row for row in rows if row["cache"] == kind]
        if not chosen:
            continue
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in fit(chosen).items())
        sys.stdout.write(f"\n## {kind}\n\n{table(chosen)}\n\nFitted: {numbers}\n")
        for row, way, gain in losses(chosen):
            at = tuple(row[name] for name in ("requests", "shared", "own"))
            sys.stdout.write(f"Slower by the decision: {at}, {way}, {gain:.3f}\n")
        differ = max(row["differ"] for row in chosen)
        sys.stdout.write(f"Largest difference of a result from plain decode: {differ:.3g}\n")
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
