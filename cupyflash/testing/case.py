"""One ragged batch described by a few numbers, and its arrays in any array module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .expect import Expected, expect_attention
from .patterns import draw
from .poison import POISON_INDEX, Placed, place, poison_of
from .precision import weight_precision
from .requests import to_numpy
from .rounding import DTYPES, round_to

__all__ = ["Case", "Inputs"]

_EXTRA_ROWS = 2
_EXTRA_PAGES = 3
_EXTRA_COLUMNS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of ``flash_attn_varlen_func``, small enough to print and to draw at random.

    Everything that must not be read is poisoned: pages that no request owns and unused slots hold
    NaN, the tail of the table 2**31 - 1, out and lse start as NaN, padding is NaN.

    Attributes
    ----------
    lengths : tuple of (q_len, context_len)
        One pair a request; it has ``q_len + context_len`` keys. A context may be negative: then
        there are fewer keys than queries.
    num_heads_kv, group_size, head_dim, head_dim_v
        ``head_dim_v`` None = ``head_dim``.
    page_size : int or None
        None = packed keys.
    causal, window_size, softcap, softmax_scale
    alibi : str
        "" = off, "head" = slopes [Hq], "request" = slopes [batch, Hq].
    sink, descale : bool
    q_v : bool
        Multi-head latent attention: queries meet v too, and k and v are parts of one cache, v
        first. ``softmax_scale`` None = ``(head_dim + head_dim_v) ** -0.5``.
    q_type, kv_type : str
        A key of ``DTYPES``; an 8-bit type is passed as uint8.
    layout, pattern : str
        See ``LAYOUTS`` and ``PATTERNS``.
    seed : int
    """

    lengths: tuple[tuple[int, int], ...]
    num_heads_kv: int = 1
    group_size: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    page_size: int | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: str = ""
    sink: bool = False
    descale: bool = False
    q_v: bool = False
    q_type: str = "fp32"
    kv_type: str = "fp32"
    layout: str = "NHD"
    pattern: str = "normal"
    seed: int = 0

    @property
    def num_heads_q(self) -> int:
        return self.num_heads_kv * self.group_size

    @property
    def q_lens(self) -> list[int]:
        return [q_len for q_len, _ in self.lengths]

    @property
    def kv_lens(self) -> list[int]:
        return [max(0, q_len + context) for q_len, context in self.lengths]

    def replace(self, **changes: Any) -> Case:
        """The same case with other settings."""
        return replace(self, **changes)

    def make(self, xp: Any = np) -> Inputs:
        """The arrays of this case, in ``numpy`` or ``cupy``; equal cases give equal bits."""
        return _Maker(self, xp).inputs()


@dataclass
class Inputs:
    """Arrays of a case and how to call attention with them.

    Attributes
    ----------
    case : Case
    args : dict
        Every argument of ``flash_attn_varlen_func`` but out and lse, by name.
    placed : dict of str to Placed
        The buffers behind q, k, v, out and lse.
    """

    case: Case
    args: dict[str, Any]
    placed: dict[str, Placed]
    _expected: Expected | None = field(default=None, repr=False)

    def call(self, attention: Callable[..., Any], **more: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Call ``flash_attn_varlen_func`` or one with its arguments; out and lse as NumPy arrays.

        Asserts that rows of no request and all padding are as they were. With
        ``return_softmax_lse=False`` the call is not given the lse, which stays NaN.
        """
        lse = self.placed["lse"].view
        wanted = {"return_softmax_lse": True, **more}
        if wanted["return_softmax_lse"]:
            wanted["lse"] = lse
        found = attention(**self.args, out=self.placed["out"].view, **wanted)
        out, lse = found if wanted["return_softmax_lse"] else (found, lse)
        rows = sum(self.case.q_lens)
        host_out, host_lse = np.array(to_numpy(out)), np.array(to_numpy(lse))
        if not np.isnan(host_out[rows:].astype(np.float32)).all():
            raise AssertionError(f"out: rows past cu_seqlens_q[-1]={rows} were written")
        if not np.isnan(host_lse[:, rows:]).all():
            raise AssertionError(f"lse: rows past cu_seqlens_q[-1]={rows} were written")
        for name, placed in self.placed.items():
            placed.assert_padding_intact(name)
        return host_out, host_lse

    def expected(self, **precision: Any) -> Expected:
        """The right answer and its bound; ``precision`` goes to ``expect_attention``."""
        if precision:
            return expect_attention(**self.args, **precision)
        if self._expected is None:
            self._expected = expect_attention(**self.args)
        return self._expected

    def check(self, attention: Callable[..., Any], **more: Any) -> None:
        """Call, and assert that the result is within the bound.

        Where kernels that round weights to 8 bits serve the call, that of such weights.
        """
        out, lse = self.call(attention, **more)
        wanted = more.get("return_softmax_lse", True)
        self.expected(**self.precision(**more)).check(out, lse if wanted else None)

    def precision(self, **more: Any) -> dict[str, Any]:
        """What `expected` has to know of the kernels that serve a call with these options."""
        if self.case.layout == "odd":
            return {}  # its rows are not for such kernels
        return weight_precision(**self.args, **more)


class _Maker:
    """Draws the values request by request, so that layout and paging never change them."""

    def __init__(self, case: Case, xp: Any) -> None:
        self.case, self.xp = case, xp
        self.rng = np.random.default_rng(case.seed)
        self.dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v

    def inputs(self) -> Inputs:
        case, xp = self.case, self.xp
        q_rows, keys, values, latent_rows = self._values()
        total_q = sum(case.q_lens) + _EXTRA_ROWS
        args: dict[str, Any] = {
            "max_seqlen_q": max(1, *case.q_lens, 0),
            "max_seqlen_k": max(1, *case.kv_lens, 0),
            "cu_seqlens_q": xp.asarray(np.cumsum([0, *case.q_lens]), dtype=np.int32),
            "causal": case.causal,
            "window_size": case.window_size,
            "softcap": case.softcap,
            "softmax_scale": self._scale(),
        }
        k, v, where = self._paged(keys, values) if case.page_size else self._packed(keys, values)
        args.update(where, **self._extras())
        out_type = DTYPES["bf16" if DTYPES[case.q_type].itemsize == 1 else case.q_type]
        out = np.full((total_q, case.num_heads_q, self.dim_v), np.nan, out_type)
        lse = np.full((case.num_heads_q, total_q), np.nan, np.float32)
        flat = "NHD" if case.layout == "HND" else case.layout
        placed = {
            "q": place(self._queries(q_rows), case.layout, xp=xp),
            "out": place(out, case.layout, xp=xp, pad=2),
            "lse": place(lse, flat, xp=xp),
        }
        if case.q_v:
            both = place(np.concatenate([v, k], axis=-1), case.layout, xp=xp)
            args.update(v=both.view[..., : self.dim_v], k=both.view[..., self.dim_v :])
            placed.update(kv=both, q_v=place(self._queries(latent_rows), case.layout, xp=xp))
        else:
            placed["k"] = place(k, case.layout, xp=xp)
            placed["v"] = place(v, case.layout, xp=xp, pad=1)
        views = ("q", "k", "v", "q_v")
        args.update({name: placed[name].view for name in views if name in placed})
        return Inputs(case, args, placed)

    def _scale(self) -> float | None:
        if self.case.softmax_scale is None and self.case.q_v:
            return float((self.case.head_dim + self.dim_v) ** -0.5)
        return self.case.softmax_scale

    def _queries(self, rows: list[NDArray[Any]]) -> NDArray[Any]:
        """All requests' rows, and poison behind them."""
        values = np.concatenate(rows)
        q = self._stored((len(values) + _EXTRA_ROWS, *values.shape[1:]), self.case.q_type)
        q[: len(values)] = self._encode(values, self.case.q_type)
        return q

    def _values(self) -> tuple[list[NDArray[Any]], ...]:
        """q, k, v, and q_v where there is one, of each request."""
        case = self.case
        drawn: tuple[list[NDArray[Any]], ...] = ([], [], [], [])
        for request, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
            rng = np.random.default_rng((case.seed, request))
            shapes = (
                (q_len, case.num_heads_q, case.head_dim),
                (kv_len, case.num_heads_kv, case.head_dim),
                (kv_len, case.num_heads_kv, self.dim_v),
                (q_len, case.num_heads_q, self.dim_v),
            )
            roles = "qkvq" if case.q_v else "qkv"
            for values, role, shape in zip(drawn, roles, shapes, strict=False):
                values.append(draw(case.pattern, role, rng, shape))
        return drawn

    def _encode(self, values: NDArray[Any], kind: str) -> NDArray[Any]:
        dtype = DTYPES[kind]
        if dtype.itemsize > 1:
            return round_to(values, dtype)
        return round_to(np.clip(values, -448, 448), dtype).view(np.uint8)

    def _stored(self, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
        dtype = DTYPES[kind] if DTYPES[kind].itemsize > 1 else np.dtype(np.uint8)
        return np.full(shape, poison_of(dtype), dtype)

    def _packed(
        self, keys: list[NDArray[Any]], values: list[NDArray[Any]]
    ) -> tuple[NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Requests one after the other; the rows after the last are poison."""
        case = self.case
        total = sum(case.kv_lens)
        k = self._stored((total + _EXTRA_ROWS, *keys[0].shape[1:]), case.kv_type)
        v = self._stored((total + _EXTRA_ROWS, *values[0].shape[1:]), case.kv_type)
        k[:total] = self._encode(np.concatenate(keys), case.kv_type)
        v[:total] = self._encode(np.concatenate(values), case.kv_type)
        starts = self.xp.asarray(np.cumsum([0, *case.kv_lens]), dtype=np.int32)
        return k, v, {"cu_seqlens_k": starts}

    def _paged(
        self, keys: list[NDArray[Any]], values: list[NDArray[Any]]
    ) -> tuple[NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Pages in random order among pages of nobody; a table with a poisoned tail."""
        case, page = self.case, self.case.page_size
        assert page is not None
        counts = [-(-kv_len // page) for kv_len in case.kv_lens]
        pool = self.rng.permutation(sum(counts) + _EXTRA_PAGES)
        table = np.full((len(counts), max(counts) + _EXTRA_COLUMNS), POISON_INDEX, np.int32)
        k = self._stored((len(pool), page, *keys[0].shape[1:]), case.kv_type)
        v = self._stored((len(pool), page, *values[0].shape[1:]), case.kv_type)
        taken = 0
        for request, count in enumerate(counts):
            blocks = pool[taken : taken + count]
            taken += count
            table[request, :count] = blocks
            token = np.arange(case.kv_lens[request])
            slot = (blocks[token // page], token % page)
            k[slot] = self._encode(keys[request], case.kv_type)
            v[slot] = self._encode(values[request], case.kv_type)
        used = self.xp.asarray(np.array(case.kv_lens, np.int32))
        wide = self.xp.asarray(np.pad(table, ((0, 0), (0, 3)), constant_values=POISON_INDEX))
        return k, v, {"seqused_k": used, "block_table": wide[:, : table.shape[1]]}

    def _extras(self) -> dict[str, Any]:
        """Slopes, sinks, descales and fp8 names, each only where the case asks for it."""
        case, extras = self.case, {}
        rng = np.random.default_rng((case.seed, 2**20))
        batch, heads = len(case.lengths), case.num_heads_q
        slopes = rng.uniform(0, 0.5, (batch, heads)).astype(np.float32)
        if case.alibi:
            extras["alibi_slopes"] = slopes if case.alibi == "request" else slopes[0]
        if case.sink:
            extras["s_aux"] = rng.standard_normal(heads).astype(np.float32)
        if case.descale:
            for name in ("k_descale", "v_descale"):
                scale = rng.uniform(0.5, 2, (batch, case.num_heads_kv))
                extras[name] = scale.astype(np.float32)
        given: dict[str, Any] = {name: self.xp.asarray(array) for name, array in extras.items()}
        if DTYPES[case.kv_type].itemsize == 1:
            given["fp8_dtype"] = case.kv_type
        if DTYPES[case.q_type].itemsize == 1:
            given["q_fp8_dtype"] = case.q_type
        return given
