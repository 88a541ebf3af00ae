"""Merging two attention states over disjoint sets of keys."""

from __future__ import annotations

import numpy as np

from cupyflash.runtime.dtypes import E4M3

from .convert import Array, round_to_fp8, storage

__all__ = ["merge_states"]

_ELEMENTS = 1 << 20


def merge_states(
    output: Array,
    prefix_output: Array,
    prefix_lse: Array,
    suffix_output: Array,
    suffix_lse: Array,
    output_lse: Array | None,
    num_prefix_tokens: int | None,
    output_scale: Array | float | None,
    s_aux: Array | None,
) -> None:
    """Write the state over the union of both key sets; arguments are validated.

    Parameters
    ----------
    output : ndarray [tokens, heads, head_dim]
        May be one of the inputs. fp8 (e4m3, uint8 too) with ``output_scale``.
    prefix_output, suffix_output : ndarray [tokens, heads, head_dim]
    prefix_lse, suffix_lse : ndarray [heads, tokens], float32
        Natural logarithm. Either infinity is an empty state, whatever its output holds.
    output_lse : ndarray [heads, tokens], float32, or None
    num_prefix_tokens : int or None
        Tokens from here on have no prefix. None = all have one.
    output_scale : float or one-element array, or None
        The output is divided by it.
    s_aux : ndarray [heads] or None
        Sink logits, merged as the state ``(0, s_aux)``.
    """
    tokens, heads, head_dim = output.shape
    step = tokens
    if not any(_overlap_shifted(output, other) for other in (prefix_output, suffix_output)):
        step = max(1, _ELEMENTS // max(1, heads * head_dim))
    sink = None if s_aux is None else s_aux.astype(np.float32)[None]
    for start in range(0, tokens, step or 1):
        part = slice(start, start + step)
        prefix_end = tokens if num_prefix_tokens is None else num_prefix_tokens
        has_prefix = np.arange(tokens)[part, None] < prefix_end
        lses = [
            np.where(has_prefix, _empty_is_minus_inf(prefix_lse.T[part]), np.float32(-np.inf)),
            _empty_is_minus_inf(suffix_lse.T[part]),
        ]
        with np.errstate(all="ignore"):
            weights, lse = _weights([*lses, sink] if sink is not None else lses)
            merged = _weighted(prefix_output[part], weights[0])
            merged += _weighted(suffix_output[part], weights[1])
            _store(output[part], merged, output_scale)
        if output_lse is not None:
            output_lse.T[part] = lse


def _overlap_shifted(output: Array, other: Array) -> bool:
    """Whether a store could overwrite tokens of ``other`` that are still to be read."""
    same = (
        output.__array_interface__["data"] == other.__array_interface__["data"]
        and output.strides == other.strides
    )
    return not same and np.may_share_memory(output, other)


def _empty_is_minus_inf(lse: Array) -> Array:
    return np.where(np.isinf(lse), np.float32(-np.inf), lse)


def _weights(lses: list[Array]) -> tuple[list[Array], Array]:
    """Normalised weight of each state, and the merged LSE; 0 and -inf where all are empty."""
    top = lses[0]
    for lse in lses[1:]:
        top = np.maximum(top, lse)
    shift = np.where(np.isneginf(top), np.float32(0), top)
    weights = [np.exp(lse - shift) for lse in lses]
    total = np.sum(weights, axis=0, dtype=np.float32)
    scale = np.where(total == 0, np.float32(1), total)
    return [weight / scale for weight in weights], top + np.log(scale)


def _weighted(values: Array, weight: Array) -> Array:
    """``values * weight`` in float32; exactly 0 where the weight is, NaN and all."""
    product = values.astype(np.float32)
    product *= weight[..., None]
    np.copyto(product, np.float32(0), where=(weight == 0)[..., None])
    return product


def _store(output: Array, merged: Array, output_scale: Array | float | None) -> None:
    if output_scale is None:
        output[...] = merged.astype(output.dtype)
        return
    merged /= np.asarray(output_scale, np.float32).reshape(())
    storage(output, E4M3)[...] = round_to_fp8(merged, E4M3)
