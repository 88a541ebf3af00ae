"""From the arguments of a public call to what is computed: a problem, its arrays, its side."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import AttentionArrays, as_array, place, specs
from .foreign import is_array
from .gpu_key import gpu_key
from .layout import Layout
from .problem import AttentionProblem, describe
from .rules.numbers import MOST_TOKENS, flag, name_of_type, non_negative, number, token_bound
from .rules.score import sides, window

__all__ = ["Call", "prepare", "refuse_options", "scale_argument"]

_TWO_INTEGERS = [int, int]
_DESCALE_NAMES = ("q_descale", "k_descale", "v_descale")
_MOST_LAYOUTS = 4096
_layouts: dict[Any, Layout] = {}
_make = tuple.__new__  # as a NamedTuple's own, in a third of the time


class Call(NamedTuple):
    """One validated attention call.

    Attributes
    ----------
    problem : AttentionProblem
        The same object for equal calls, so ``is`` finds what was planned for it.
    arrays : AttentionArrays
        NumPy's or CuPy's, over the caller's memory.
    descales : tuple
        For q, k and v: None, a float, or an array.
    on_host : bool
        Computed with NumPy.
    layout : Layout
        What it shares with every call of the same shapes, strides and options.
    """

    problem: AttentionProblem
    arrays: AttentionArrays
    descales: tuple[Any, Any, Any]
    on_host: bool
    layout: Layout


def prepare(
    arrays: AttentionArrays,
    descales: tuple[Any, Any, Any],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    fp8_dtype: str,
    q_fp8_dtype: str | None,
    wants_lse: bool,
    num_splits: int,
    batch_invariant: bool,
    stream: Any = None,
) -> Call:
    """Validate one call of ``flash_attn_varlen_func``; no array is read.

    Arrays of other libraries are ready for ``stream``.

    Raises
    ------
    TypeError, ValueError
        As ``flash_attn_varlen_func``.
    """
    # What is of the right type already is passed on; the rest is converted or refused.
    if type(max_seqlen_q) is not int or not 0 <= max_seqlen_q <= MOST_TOKENS:
        max_seqlen_q = token_bound("max_seqlen_q", max_seqlen_q)
    if type(max_seqlen_k) is not int or not 0 <= max_seqlen_k <= MOST_TOKENS:
        max_seqlen_k = token_bound("max_seqlen_k", max_seqlen_k)
    if type(num_splits) is not int or not 0 <= num_splits <= MOST_TOKENS:
        num_splits = min(non_negative("num_splits", num_splits), MOST_TOKENS)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = number("softmax_scale", softmax_scale)
    if type(softcap) is not float:
        softcap = number("softcap", softcap)
    if type(causal) is not bool:
        causal = flag("causal", causal)
    if type(wants_lse) is not bool:
        wants_lse = flag("return_softmax_lse", wants_lse)
    if type(batch_invariant) is not bool:
        batch_invariant = flag("batch_invariant", batch_invariant)
    if window_size is not None:
        window_size = sides(window_size)
        if [type(side) for side in window_size] != _TWO_INTEGERS:
            window_size = window(window_size, False)
    if type(fp8_dtype) is not str:
        fp8_dtype = name_of_type("fp8_dtype", fp8_dtype)
    if q_fp8_dtype is not None and type(q_fp8_dtype) is not str:
        q_fp8_dtype = name_of_type("q_fp8_dtype", q_fp8_dtype)
    options = (
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap, fp8_dtype,
        q_fp8_dtype, wants_lse, num_splits, batch_invariant,
    )  # fmt: skip
    key = gpu_key((*arrays, *descales), options)
    layout = None if key is None else _layouts.get(key)
    if layout is None:
        return _place_and_describe(arrays, descales, options, key, stream)
    return _make(Call, (layout.problem, arrays, descales, False, layout))


def _place_and_describe(
    arrays: AttentionArrays,
    descales: tuple[Any, Any, Any],
    options: tuple[Any, ...],
    key: Any,
    stream: Any,
) -> Call:
    given = (*arrays, *descales)
    placed, descales, on_host = _placed(arrays, descales, stream)
    _, _, softmax_scale, _, _, softcap, *_ = options
    if softmax_scale is not None:
        number("softmax_scale", softmax_scale)  # finite
    number("softcap", softcap)
    found = specs(placed)
    scales = tuple(
        s if s is None or type(s) is float else (s.shape, s.dtype, s.strides) for s in descales
    )
    own_key = (found, scales, options, on_host)
    layout = _layouts.get(own_key)
    if layout is None:
        layout = Layout(describe(found, scales, *options, on_host), found, scales)
    if len(_layouts) >= _MOST_LAYOUTS:
        _layouts.clear()
    layout = _layouts.setdefault(own_key, layout)
    if key is not None and all(a is b for a, b in zip(given, (*placed, *descales), strict=True)):
        _layouts[key] = layout
    return Call(layout.problem, AttentionArrays(*placed), descales, on_host, layout)


def _placed(
    arrays: AttentionArrays, descales: tuple[Any, Any, Any], stream: Any
) -> tuple[Any, tuple[Any, Any, Any], bool]:
    q, k, v = (scale_argument(n, d, stream) for n, d in zip(_DESCALE_NAMES, descales, strict=True))
    extra = [None if type(s) is float else s for s in (q, k, v)]
    names = (*AttentionArrays._fields, *_DESCALE_NAMES)
    placed, on_host = place(names, (*arrays, *extra), stream)
    q, k, v = (
        given if array is None else array
        for given, array in zip((q, k, v), placed[len(arrays) :], strict=True)
    )
    return placed[: len(arrays)], (q, k, v), on_host


def scale_argument(name: str, value: Any, stream: Any = None) -> Any:
    """A scale as None, a float, or an array.

    Raises
    ------
    TypeError, ValueError
        It is neither a finite number nor an array.
    """
    if value is None:
        return None
    if type(value).__module__ == "cupy":
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return number(name, value)
    if is_array(value):
        return as_array(value, name, stream)
    return number(name, value)


def refuse_options(dropout_p: float, return_attn_probs: bool) -> None:
    """Refuse what no version does.

    Raises
    ------
    ValueError
        Dropout, or weights asked for.
    """
    if dropout_p != 0:
        raise ValueError(f"dropout_p={dropout_p}: inference has no dropout; use 0")
    if return_attn_probs:
        raise ValueError(
            "return_attn_probs=True: the weights are never stored; use return_softmax_lse=True"
        )
