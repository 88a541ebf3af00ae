"""What a call must return, and the check of what it did return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .baseline import PHASES, baseline_of, merge_baseline
from .compare import assert_within
from .oracle import merge_oracle, oracle_of
from .requests import Float64, Request, requests, to_numpy, unowned
from .rounding import DTYPES

__all__ = ["Expected", "expect_attention", "expect_merge"]

_UNIT = 2.0**-24  # what one float32 operation may be off by, relatively


@dataclass(frozen=True)
class Expected:
    """The right answer of one call and the error it may have.

    Attributes
    ----------
    out : float64 [total_q, num_heads_q, head_dim_v]
    lse : float64 [num_heads_q, total_q]
    out_baseline, lse_baseline : float64
    out_floor, lse_floor : float
        What scores and sums of weights in float32 may cost, whatever the order of the sums.
    starts : ndarray or None
        ``cu_seqlens_q``, to name the request in a message.
    """

    out: Float64
    lse: Float64
    out_baseline: NDArray[Any]
    lse_baseline: NDArray[Any]
    out_floor: float
    lse_floor: float
    starts: NDArray[Any] | None = None

    def check(self, out: Any, lse: Any = None, *, factor: float = 2.0) -> None:
        """Assert that ``out`` and ``lse`` are within the bound; rows of no request are skipped.

        Raises
        ------
        AssertionError
            As ``assert_within``, with the request and the row of the worst element.
        """
        first, last = (0, len(self.out)) if self.starts is None else self.starts[[0, -1]]
        used = np.arange(first, last)
        assert_within(
            to_numpy(out)[used],
            self.out[used],
            self.out_baseline[used],
            factor=factor,
            floor=self.out_floor,
            describe=lambda at: self._where(int(used[at[0]]), f"head {at[1]}, dim {at[2]}"),
        )
        if lse is not None:
            assert_within(
                to_numpy(lse)[:, used],
                self.lse[:, used],
                self.lse_baseline[:, used],
                factor=factor,
                floor=self.lse_floor,
                name="lse",
                describe=lambda at: self._where(int(used[at[1]]), f"head {at[0]}"),
            )

    def _where(self, row: int, rest: str) -> str:
        if self.starts is None:
            return f"token {row}, {rest}"
        request = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"request {request}, row {row - int(self.starts[request])}, {rest}"


def _on_host(value: Any) -> Any:
    return to_numpy(value) if hasattr(value, "dtype") else value


def expect_attention(
    q: Any,
    k: Any,
    v: Any,
    *args: Any,
    p_dtype: Any = None,
    out_dtype: Any = None,
    **kwargs: Any,
) -> Expected:
    """What ``flash_attn_varlen_func`` must return for these arguments.

    Parameters
    ----------
    q, k, v, *args, **kwargs
        The arguments of the call as they are, with ``cu_seqlens_q``; options that only decide how
        the work is scheduled are dropped. The first axis of q may hold more rows than requests.
    p_dtype : dtype or str, optional
        The type in which the baseline rounds P: default q's, float16 for an 8-bit q. Each element
        has the worst error of several scales of P, unless it is float32.
    out_dtype : dtype or str, optional
        Default q's type, bfloat16 for an 8-bit q.

    Returns
    -------
    Expected
    """
    q, k, v = to_numpy(q), to_numpy(k), to_numpy(v)
    args = tuple(_on_host(a) for a in args)
    kwargs = {name: _on_host(a) for name, a in kwargs.items()}
    kind = q.dtype
    one_byte = kind.itemsize == 1
    p = _named(p_dtype, DTYPES["fp16"] if one_byte else kind)
    o = _named(out_dtype, DTYPES["bf16"] if one_byte else kind)
    each = list(requests(q, k, v, *args, **kwargs))
    out, lse = oracle_of(each, *unowned(q, k, v))
    low_out, low_lse = _low_precision(out, p, o, each)
    loss, largest = 0.0, 0.0
    for request in each:
        loss = max(loss, _score_loss(request) + (_sum_loss(request) if p.itemsize < 4 else 0.0))
        largest = max(largest, float(np.abs(np.nan_to_num(request.v)).max(initial=0.0)))
    starts = args[1] if len(args) > 1 else kwargs["cu_seqlens_q"]
    return Expected(out, lse, low_out, low_lse, 2 * loss * largest, loss, starts)


def _low_precision(out: Float64, p: Any, o: Any, each: list[Request]) -> tuple[Float64, Float64]:
    """The baseline of ``out`` and of the LSE, with the worst error of several scales of P.

    Of 16 bits the scales are those by which the largest weight is rounded the furthest. That leaves
    nothing to chance, which is what the bound doubles a baseline's error for: such an error counts
    once, beside once that of the first scale.
    """

    def rounded(o: Any, **how: Any) -> tuple[Float64, Float64]:
        empty = np.full_like(out, np.nan), np.full(out.shape[1::-1], np.nan)
        return baseline_of(each, *empty, p_dtype=p, out_dtype=o, **how)

    low, lse = rounded(o)
    if p.itemsize == 1:
        for phase in PHASES[1:]:
            more, _ = rounded(o, p_phase=phase)
            low = np.where(np.abs(more - out) > np.abs(low - out), more, low)
    elif p.itemsize == 2:
        with np.errstate(invalid="ignore"):
            first = error = np.abs(low - out)
            for way in (-1, 1):
                more, _ = rounded(np.float32, p_shift=way)
                error = np.fmax(error, (first + np.abs(more - out)) / 2)
            low = np.where(np.isfinite(error), out + error, low)
    return low, lse


def _named(given: Any, default: np.dtype[Any]) -> np.dtype[Any]:
    if given is None:
        return default
    return DTYPES[given] if isinstance(given, str) else np.dtype(given)


def _score_loss(request: Request) -> float:
    """What float32 may cost a score: D roundings of a sum that grows to |q| |k|, and a few more.

    Where all terms are equal every rounding goes the same way, so this is reached, not only a
    bound.
    """
    if not len(request.q) or not len(request.k):
        return 0.0
    head_dim = request.q.shape[-1]
    scale = request.options.get("softmax_scale")
    scale = head_dim**-0.5 if scale is None else abs(float(scale))
    group = request.q.shape[1] // request.k.shape[1]
    k = np.abs(np.nan_to_num(request.k))
    sums = [np.abs(request.q[:, h]) @ k[:, h // group].T for h in range(request.q.shape[1])]
    loss: float = head_dim / 2 * float(np.max(sums)) * scale
    if request.options.get("softcap"):
        loss += float(request.options["softcap"])
    if request.options.get("alibi_slopes") is not None:
        span = max(len(request.q), len(request.k))
        loss += float(np.abs(request.options["alibi_slopes"]).max()) * span
    return loss * _UNIT


def _sum_loss(request: Request) -> float:
    """What float32 may cost the logarithm of a sum of weights, beside the scores.

    One rounding each of the weights, of their sum and of the sum with the sink, all relative to the
    sum, and one of its logarithm, which is at most that of the number of keys and the sink.
    """
    return (3 + float(np.log1p(len(request.k)))) * _UNIT


def expect_merge(*states: tuple[Any, Any], out_dtype: Any, s_aux: Any = None) -> Expected:
    """What a merge of ``(out, lse)`` states must return; see ``merge_oracle``."""
    out, lse = merge_oracle(*states, s_aux=s_aux)
    low_out, low_lse = merge_baseline(*states, out_dtype=_named(out_dtype, out.dtype), s_aux=s_aux)
    lses = [to_numpy(given).astype(np.float64) for _, given in states]
    largest = max(float(np.abs(each[np.isfinite(each)]).max(initial=1.0)) for each in lses)
    loss = 2 * largest * _UNIT
    reach = float(np.abs(out[np.isfinite(out)]).max(initial=0.0))
    return Expected(out, lse, low_out, low_lse, 2 * loss * reach, loss)
