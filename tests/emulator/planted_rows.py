"""Bugs planted in the merge and the cache write."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cupyflash.kv_cache import reshape_and_cache_flash
from cupyflash.merge import merge_attn_states
from cupyflash.testing import DTYPES, Case, expect_merge, write_oracle

from .device import device_array
from .planted import Planted

__all__ = ["PLANTED_ROWS", "planted_row"]

MERGE, WRITE = "merge_attn_states.cu", "reshape_and_cache.cu"


def _of(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    array = device_array(shape, DTYPES[kind])
    array[...] = rng.standard_normal(shape).astype(array.dtype)
    return array


def _merge(tokens: int = 70, heads: int = 3, dim: int = 64, context: int | None = None) -> None:
    rng = np.random.default_rng(7)
    states = []
    for empty in (-np.inf, np.inf):
        out, lse = _of((tokens, heads, dim), "bf16", rng), _of((heads, tokens), "fp32", rng)
        lse[rng.random(lse.shape) < 0.2] = empty
        out[np.isinf(lse.T)] = np.nan
        states.append((out, lse))
    if context is not None:
        states[0][0][context:], states[0][1][:, context:] = np.nan, np.nan
    out, lse = device_array(states[0][0].shape, DTYPES["bf16"]), device_array((heads, tokens), "f4")
    merge_attn_states(out, *states[0], *states[1], lse, prefill_tokens_with_context=context)
    if context is not None:
        states[0][0][context:], states[0][1][:, context:] = 0, -np.inf
    expect_merge(*states, out_dtype="bf16").check(out, lse)


def _write(count: int = 37, heads: int = 3, dim: int = 64, odd: bool = False) -> None:
    rng = np.random.default_rng(8)
    key = _of((count, heads, dim), "bf16", rng)
    caches = [device_array((4, 16, heads, dim), np.uint8) for _ in range(2)]
    if odd:
        caches[1] = device_array((4, 16, heads, dim + 1), np.uint8)[..., 1:]
    before = [cache.copy() for cache in caches]
    slots = rng.permutation(64)[:count]
    slots[::5], slots[3] = -1, 64
    scale = rng.uniform(0.5, 4, heads).astype(np.float32)
    reshape_and_cache_flash(key, key, *caches, slots, "fp8", scale, 0.25)
    kept = np.where(slots < 64, slots, -1)
    for cache, old, each in zip(caches, before, (scale, 0.25), strict=True):
        assert write_oracle(key, old, kept, each, fp8_dtype="fp8").tobytes() == cache.tobytes()


@dataclass(frozen=True)
class PlantedRow(Planted):
    run: Callable[[], None] = _merge

    def attend(self) -> None:
        self.run()


def planted_row(
    name: str, source: str, pattern: str, replacement: str, run: Callable[[], None], **more: int
) -> PlantedRow:
    return PlantedRow(name, source, pattern, replacement, Case(lengths=((1, 1),)), run=run, **more)


def _odd() -> None:
    _write(odd=True)


def _short() -> None:
    _merge(context=33)


PLANTED_ROWS = [
    planted_row("merge: nothing", MERGE, "", "", _merge),
    planted_row("merge: nothing, a short prefix", MERGE, "", "", _short),
    planted_row("merge: rows do not wait for weights", MERGE, r"__syncthreads\(\);", ";", _merge),
    planted_row("merge: a tile past the last token", MERGE, r"row_token < p\.tokens && ", "", _merge),
    planted_row("merge: a row past the last token is stored", MERGE, r"if \(token \+ i \* blockDim\.z >= p\.tokens\) break;", "", _merge),
    planted_row("merge: an empty side is read", MERGE, r"if \(w\.prefix != 0\.f\) prefix", "prefix", _merge),
    planted_row("merge: a prefix that a token has not", MERGE, r"if \(token < p\.prefix_tokens\) \{", "{", _short),
    planted_row("merge: weights of the neighbour", MERGE, r"threadIdx\.y \* tile_tokens \+ threadIdx\.z", "threadIdx.y * tile_tokens", _merge),
    planted_row("write: nothing", WRITE, "", "", _write),
    planted_row("write: nothing, odd rows", WRITE, "", "", _odd),
    planted_row("write: a negative slot", WRITE, r"slot < 0 \|\| ", "", _write),
    planted_row("write: a slot past the end", WRITE, r" \|\| slot >= p\.num_slots", "", _write),
    planted_row("write: a token past the last", WRITE, r" \|\| token >= p\.num_tokens\) return", ") return", _write),
    planted_row("write: the scale of the first head", WRITE, r"\+ head \* p\.side\[which\]\.scale_stride", "", _write),
    planted_row("write: wide stores to odd rows", WRITE, r"if \(p\.vectorised\)", "if (true)", _odd),
    planted_row("write: half of a row", WRITE, r"x \+= kAccesses \* blockDim\.x", "x += p.head_dim[which]", lambda: _write(dim=1100, odd=True)),
]  # fmt: skip
