"""Merging attention states."""

from __future__ import annotations

from typing import Any

from . import cpu
from .runtime import env
from .runtime.arrays import place, specs
from .runtime.call import scale_argument
from .runtime.foreign_views import gpu_views
from .runtime.gpu_key import gpu_key
from .runtime.merge_launch import merge_known, merge_states
from .runtime.nvtx import call_range
from .runtime.rules.merge import MERGE_ARRAYS, check_merge
from .runtime.rules.numbers import non_negative

__all__ = ["merge_attn_states"]


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
    *,
    s_aux: Any = None,
    stream: Any = None,
) -> None:
    """Merge the states of two disjoint sets of keys into the state of their union.

    A state is ``(out, lse)``: the outputs are averaged with weights ``exp(lse)``, and the new lse
    is ``log(exp(a) + exp(b))``. ``(anything, -inf)`` is the empty state; two of them give
    ``(0, -inf)``. An lse of +inf is read as empty too.

    Parameters
    ----------
    output : array [tokens, Hq, D]
        Written in place; may be one of the inputs. The inputs' dtype; or e4m3 (as uint8 too).
    prefix_output, suffix_output : array [tokens, Hq, D], float32, float16 or bfloat16
        Any strides, the last dimension contiguous.
    prefix_lse, suffix_lse : array [Hq, tokens], float32
        Natural logarithms; any strides.
    output_lse : array [Hq, tokens], float32, optional
        Written in place.
    prefill_tokens_with_context : int, optional
        Only the first so many tokens have a prefix; the others take the suffix as it is. More
        than there are means all.
    output_scale : number or array [1], float32, optional
        An e4m3 output stores ``x / output_scale``, saturated. It needs one, and only it takes one.
    s_aux : array [Hq], float32, float16 or bfloat16, optional
        Sink logits, merged once, as a state of output 0.
    stream : int or stream, optional
        The current stream of the arrays' device if None. The CPU has none.

    Raises
    ------
    TypeError
        A dtype, or arrays on the CPU and on a GPU in one call.
    ValueError
        A shape or a scale.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.ones((1, 1, 8), np.float32)
    >>> lse = np.full((1, 1), np.log(2), np.float32)
    >>> merge_attn_states(one, one * 0, lse, one, lse + np.float32(np.log(4)))
    >>> one[0, 0, 0]
    np.float32(0.8)
    """
    given = (
        output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse, s_aux,
    )  # fmt: skip
    seen, context = None, prefill_tokens_with_context
    if output is not None and not env.debug():
        seen = gpu_key((*given, output_scale), None)
        if seen is None and (views := gpu_views(given, MERGE_ARRAYS, stream)):
            given, seen = views, gpu_key((*views, output_scale), None)
        usual = context is None or (type(context) is int and context >= 0)
        if usual and seen is not None and merge_known(seen, given, context, output_scale, stream):
            return
    scale = scale_argument("output_scale", output_scale, stream)
    number, on_array = (scale, None) if isinstance(scale, float) else (None, scale)
    arrays, on_host = place(MERGE_ARRAYS, (*given, on_array), stream)
    shapes = specs(arrays)
    out_type = check_merge(shapes, number)
    tokens = arrays[0].shape[0]
    with_prefix = tokens
    if prefill_tokens_with_context is not None:
        given_tokens = non_negative("prefill_tokens_with_context", prefill_tokens_with_context)
        with_prefix = min(tokens, given_tokens)
    if on_host:
        if stream is not None:
            raise ValueError("stream given, but NumPy arrays are merged before the call returns")
        *states, sinks, on_array = arrays
        scale = number if on_array is None else on_array
        cpu.merge_states(*states, with_prefix, scale, sinks)  # type: ignore[call-arg]
        return
    asked = (tuple(arrays), shapes, with_prefix, number, out_type, stream, seen)
    if env.debug():
        with call_range(f"merge_attn_states, {tokens} tokens"):
            merge_states(*asked)
    else:
        merge_states(*asked)
