"""From the arguments of a public call to what is computed: a problem, its arrays, its side."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import AttentionArrays, as_array, place, specs
from .problem import AttentionProblem, describe
from .rules.numbers import flag, name_of_type, non_negative, number

__all__ = ["Call", "prepare", "refuse_options", "scale_argument"]

_NO_DESCALES = (None, None, None)
_DESCALE_NAMES = ("q_descale", "k_descale", "v_descale")


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
    """

    problem: AttentionProblem
    arrays: AttentionArrays
    descales: tuple[Any, Any, Any]
    on_host: bool


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
) -> Call:
    """Validate one call of ``flash_attn_varlen_func``; no array is read.

    Raises
    ------
    TypeError, ValueError
        As ``flash_attn_varlen_func``.
    """
    if descales[0] is None and descales[1] is None and descales[2] is None:
        placed, on_host = place(AttentionArrays._fields, arrays)
        scale_specs: tuple[Any, ...] = _NO_DESCALES
    else:
        placed, descales, on_host = _place_with_descales(arrays, descales)
        scale_specs = tuple(
            (s.shape, s.dtype, s.strides) if hasattr(s, "shape") else s for s in descales
        )
    if type(max_seqlen_q) is not int or max_seqlen_q < 0:
        max_seqlen_q = non_negative("max_seqlen_q", max_seqlen_q)
    if type(max_seqlen_k) is not int or max_seqlen_k < 0:
        max_seqlen_k = non_negative("max_seqlen_k", max_seqlen_k)
    if type(num_splits) is not int or num_splits < 0:
        num_splits = non_negative("num_splits", num_splits)
    problem = describe(
        specs(placed),
        scale_specs,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale if softmax_scale is None else number("softmax_scale", softmax_scale),
        flag("causal", causal),
        window_size if window_size is None else tuple(window_size),
        number("softcap", softcap),
        name_of_type("fp8_dtype", fp8_dtype),
        q_fp8_dtype if q_fp8_dtype is None else name_of_type("q_fp8_dtype", q_fp8_dtype),
        flag("return_softmax_lse", wants_lse),
        num_splits,
        flag("batch_invariant", batch_invariant),
        on_host,
    )
    if placed is not arrays:
        arrays = AttentionArrays(*placed)
    return Call(problem, arrays, descales, on_host)


def _place_with_descales(
    arrays: AttentionArrays, descales: tuple[Any, Any, Any]
) -> tuple[Any, tuple[Any, Any, Any], bool]:
    q, k, v = (scale_argument(name, d) for name, d in zip(_DESCALE_NAMES, descales, strict=True))
    extra = [s if hasattr(s, "shape") else None for s in (q, k, v)]
    names = (*AttentionArrays._fields, *_DESCALE_NAMES)
    placed, on_host = place(names, (*arrays, *extra))
    q, k, v = (
        given if array is None else array
        for given, array in zip((q, k, v), placed[len(arrays) :], strict=True)
    )
    return placed[: len(arrays)], (q, k, v), on_host


def scale_argument(name: str, value: Any) -> Any:
    """A scale as None, a float, or an array.

    Raises
    ------
    TypeError, ValueError
        It is neither a finite number nor an array.
    """
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return number(name, value)
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return as_array(value, name)
    return number(name, value)


def refuse_options(
    dropout_p: float,
    return_attn_probs: bool,
    cp_world_size: int,
    cp_rank: int,
    cp_tot_seqused_k: Any,
) -> None:
    """Refuse what no version does.

    Raises
    ------
    ValueError
        Dropout, or weights asked for.
    NotImplementedError
        Context parallelism.
    """
    if dropout_p != 0:
        raise ValueError(f"dropout_p={dropout_p}: inference has no dropout; use 0")
    if return_attn_probs:
        raise ValueError(
            "return_attn_probs=True: the weights are never stored; use return_softmax_lse=True"
        )
    if (cp_world_size, cp_rank) != (1, 0) or cp_tot_seqused_k is not None:
        raise NotImplementedError(
            f"cp_world_size={cp_world_size}, cp_rank={cp_rank}: context parallelism is not "
            "available in this release; use 1 and 0, without cp_tot_seqused_k"
        )
