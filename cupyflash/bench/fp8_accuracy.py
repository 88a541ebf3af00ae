"""Errors of 8-bit attention against float64, by the number of keys, and needles among 128k keys.

``python -m cupyflash.bench.fp8_accuracy --peers-folder .peers --json e.json --plot e.png``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["KINDS", "LENGTHS", "errors", "main", "needles"]

KINDS = ("normal", "outlier", "positive mean")
"""N(0, 1); with N(0, 100) added to one element in 1000; values of mean 1."""

LENGTHS = (1024, 4096, 16384, 65536, 131072)
WEIGHTS = (0.1, 0.03, 0.01, 0.003, 0.001)
_ROWS, _HEADS, _CODES = 256, 2, 1024

Result = dict[str, Any]


def _draw(kind: str, keys: int, seed: int, dim: int) -> list[Any]:
    import cupy as cp

    rng = cp.random.default_rng(seed)
    drawn = [rng.standard_normal((n, _HEADS, dim), dtype=np.float32) for n in (_ROWS, keys, keys)]
    if kind == "outlier":
        for x in drawn:
            rare = rng.random(x.shape, dtype=np.float32) < 1e-3
            x += rng.standard_normal(x.shape, dtype=np.float32) * 10 * rare
    if kind == "positive mean":
        drawn[2] += 1
    return drawn


def _quantised(drawn: list[Any]) -> tuple[list[Any], list[float]]:
    import cupyflash as cf

    pairs = [cf.quantize_fp8(x) for x in drawn]
    return [bits for bits, _ in pairs], [float(scale[0]) for _, scale in pairs]


def _values(bits: Any, scale: float) -> Any:
    import cupy as cp

    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return cp.asarray(every)[bits] * scale


def _right(bits: list[Any], scales: list[float]) -> Any:
    """Attention of the values that the bytes stand for, in float64."""
    import cupy as cp

    q, k, v = (_values(x, scale) for x, scale in zip(bits, scales, strict=True))
    out = cp.empty(q.shape)
    for head in range(q.shape[1]):
        score = q[:, head] @ k[:, head].T * q.shape[2] ** -0.5
        weight = cp.exp(score - score.max(axis=1, keepdims=True))
        out[:, head] = weight @ v[:, head] / weight.sum(axis=1, keepdims=True)
    return out


def _providers(peers: Path | None) -> dict[str, Callable[..., None]]:
    """By name: a call of ``(q, k, v, starts, scales, out)``."""
    import cupyflash as cf

    def own(splits: int) -> Callable[..., None]:
        def call(q: Any, k: Any, v: Any, starts: list[Any], scales: list[float], out: Any) -> None:
            q_scale, k_scale, v_scale = scales
            cf.flash_attn_varlen_func(
                q, k, v, len(q), starts[0], len(k), starts[1], out=out, num_splits=splits,
                q_descale=q_scale, k_descale=k_scale, v_descale=v_scale,
            )  # fmt: skip

        return call

    found: dict[str, Callable[..., None]] = {"cupyflash": own(1), "cupyflash, keys split": own(0)}
    if peers is not None:
        found["FA3"] = _fa3(peers)
    return found


def _fa3(folder: Path) -> Callable[..., None]:
    from .peers import fa3_forward

    return lambda *args: fa3_forward(folder, *args)


def _outputs(
    providers: dict[str, Callable[..., None]], bits: list[Any], scales: list[float]
) -> Iterator[tuple[str, Any]]:
    import cupy as cp

    starts = [cp.asarray([0, len(x)], np.int32) for x in bits[:2]]
    for name, call in providers.items():
        out = cp.empty(bits[0].shape, ml_dtypes.bfloat16)
        call(*bits, starts, scales, out)
        cp.cuda.runtime.deviceSynchronize()
        yield name, cp.asarray(out.get().astype(np.float64))


def errors(peers: Path | None = None, seeds: int = 2, head_dim: int = 128) -> list[Result]:
    """Root mean square errors over those of the right answer, by data and number of keys.

    ``bias`` is the mean of the result over the right one, minus 1.
    """
    import cupy as cp

    found: list[Result] = []
    for kind in KINDS:
        for keys in LENGTHS:
            squares: dict[str, list[tuple[float, float]]] = {}
            for seed in range(seeds):
                bits, scales = _quantised(_draw(kind, keys, 1000 * seed + keys, head_dim))
                right = _right(bits, scales)
                size = float(cp.linalg.norm(right))
                for name, out in _outputs(_providers(peers), bits, scales):
                    error = float(cp.linalg.norm(out - right)) / size
                    squares.setdefault(name, []).append((error, float(out.mean() / right.mean())))
            row: Result = {"data": kind, "keys": keys}
            for name, seen in squares.items():
                rms = float(np.sqrt(np.mean([error**2 for error, _ in seen])))
                row[name] = {"error": rms, "bias": float(np.mean([mean for _, mean in seen])) - 1}
            found.append(row)
    return found


def needles(
    peers: Path | None = None, keys: int = LENGTHS[-1], head_dim: int = 128
) -> list[Result]:
    """How often a key of little weight is found again among ``keys``.

    The value of one key a query is a code of signs; all others have mean 1. Found is it where the
    result, less the mean, is nearest to its code out of 1024.
    """
    import cupy as cp

    rng = cp.random.default_rng(5)
    q, k, v = _draw("positive mean", keys, 5, head_dim)
    book = cp.sign(rng.standard_normal((_CODES, head_dim), dtype=np.float32))
    order = np.random.default_rng(6)
    where = cp.asarray(order.choice(keys, _ROWS, replace=False))
    mine = cp.asarray(order.integers(0, _CODES, _ROWS))
    v[where] = 4 * book[mine][:, None]
    found = []
    for weight in WEIGHTS:
        score = np.log(weight / (1 - weight)) + np.log(keys) + 0.5
        hidden = k.copy()
        hidden[where] = q * (score * head_dim**0.5 / (q**2).sum(axis=2, keepdims=True))
        bits, scales = _quantised([q, hidden, v])
        mean = _values(bits[2], scales[2]).mean()

        def hits(out: Any, mean: Any = mean) -> float:
            nearest = ((out[:, 0] - mean) @ book.T.astype(np.float64)).argmax(axis=1)
            return float((nearest == mine).mean())

        row: Result = {"weight": weight, "float64": hits(_right(bits, scales))}
        row.update({name: hits(out) for name, out in _outputs(_providers(peers), bits, scales)})
        found.append(row)
    return found


def plot(found: Result, path: Path) -> None:
    """The errors, a panel a kind of data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(KINDS))
    for axes, kind in zip(panels, KINDS, strict=True):
        rows = [row for row in found["errors"] if row["data"] == kind]
        for name in (name for name in rows[0] if name not in ("data", "keys")):
            points = [row[name]["error"] for row in rows]
            axes.semilogx([row["keys"] for row in rows], points, marker="o", label=name, base=2)
        axes.set(title=kind, xlabel="keys", ylabel="relative error (rms)")
        axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    """Print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--peers-folder", type=Path)
    parser.add_argument("--head-dim", type=int, default=128)
    given = parser.parse_args(arguments)
    found: Result = {
        "needles": needles(given.peers_folder, head_dim=given.head_dim),
        "errors": errors(given.peers_folder, head_dim=given.head_dim),
    }
    for row in (*found["needles"], *found["errors"]):
        sys.stdout.write(json.dumps(row) + "\n")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.plot:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
