"""Shared prefixes: merging attention states, and attention in two levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import cpu
from .attention import flash_attn_varlen_func
from .runtime import rules
from .runtime.arrays import as_array, on_host
from .runtime.dtypes import E4M3, ScalarType, scalar_type

__all__ = ["cascade_attention", "merge_attn_states", "use_cascade_attention"]

_TILE = 128  # rows and keys of a tile in the cost model of `use_cascade_attention`
_SHORTEST_PREFIX = 256
_FEWEST_REQUESTS = 8


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

    A state is ``(out, lse)``; with weights ``exp(lse)`` the outputs are averaged, and the new lse
    is ``log(exp(a) + exp(b))``. ``(anything, -inf)`` is the empty state, and two of them give
    ``(0, -inf)``; an lse of +inf is read as empty too.

    Parameters
    ----------
    output : array [tokens, Hq, D]
        Written in place; may be one of the inputs. The inputs' dtype; or e4m3 (uint8 too).
    prefix_output, suffix_output : array [tokens, Hq, D], float32, float16 or bfloat16
    prefix_lse, suffix_lse : array [Hq, tokens], float32
        Natural logarithms.
    output_lse : array [Hq, tokens], float32, optional
        Written in place.
    prefill_tokens_with_context : int, optional
        Only the first so many tokens have a prefix; the others take the suffix as it is.
    output_scale : number or array [1], float32, optional
        The output is divided by it before it is rounded to e4m3; e4m3 needs it.
    s_aux : array [Hq], float32, float16 or bfloat16, optional
        Sink logits, merged once as a state of output 0.
    stream : int or stream, optional
        The current stream if None.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit; says what would.
    """
    names = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")
    given = (output, prefix_output, prefix_lse, suffix_output, suffix_lse)
    arrays = {name: as_array(array, name) for name, array in zip(names, given, strict=True)}
    for name, array in (("output_lse", output_lse), ("s_aux", s_aux)):
        arrays[name] = None if array is None else as_array(array, name)
    scale = output_scale
    if scale is not None and not hasattr(scale, "shape"):
        scale = rules.python_scalar("output_scale", scale)
    host = on_host(**arrays, output_scale=None if isinstance(scale, float) else scale)
    out_type = _check_merge(arrays, scale)
    tokens = arrays["output"].shape[0]
    with_prefix = tokens
    if prefill_tokens_with_context is not None:
        rules.check_bound("prefill_tokens_with_context", prefill_tokens_with_context)
        with_prefix = min(int(prefill_tokens_with_context), tokens)
    call = {**arrays, "output_scale": scale}
    if host:
        cpu.merge_states(**call, num_prefix_tokens=with_prefix)
        return
    from .runtime.small_kernels import merge_states

    merge_states(**call, prefix_tokens=with_prefix, out_type=out_type, stream=stream)


def _check_merge(arrays: dict[str, Any], scale: Any) -> ScalarType:
    """The type of the output."""
    output, first, second = (
        rules.spec_of(arrays[n]) for n in ("output", "prefix_output", "suffix_output")
    )
    shape = rules.check_rank("output", output, 3, "[tokens, Hq, D]")
    tokens, heads, _ = shape
    for name, spec in (("prefix_output", first), ("suffix_output", second)):
        rules.check_output(name, spec, shape)
        if spec.dtype != first.dtype:
            raise TypeError(f"prefix_output is {first.dtype}, suffix_output {second.dtype}")
    source = scalar_type(first.dtype)
    if source is None or source.is_fp8:
        raise TypeError(f"prefix_output is {first.dtype}; use float32, float16 or bfloat16")
    for name in ("prefix_lse", "suffix_lse", "output_lse"):
        if arrays[name] is not None:
            spec = rules.spec_of(arrays[name])
            if spec.dtype != np.float32:
                raise TypeError(f"{name} is {spec.dtype}; it must be float32")
            if spec.shape != (heads, tokens):
                raise ValueError(f"{name} has shape {spec.shape}; it must be [{heads}, {tokens}]")
    if arrays["s_aux"] is not None:
        rules.check_modifiers(None, rules.spec_of(arrays["s_aux"]), heads, 0)
    return _merge_output_type(output, source, scale)


def _merge_output_type(output: rules.ArraySpec, source: ScalarType, scale: Any) -> ScalarType:
    kind = E4M3 if output.dtype == np.uint8 else scalar_type(output.dtype)
    if kind is E4M3:
        if scale is None:
            raise ValueError("output in e4m3 needs output_scale")
        if not isinstance(scale, float):
            spec = rules.spec_of(scale)
            if spec.dtype != np.float32 or spec.shape not in ((), (1,)):
                raise ValueError(f"output_scale is {spec.dtype} {spec.shape}; use float32 [1]")
        elif not scale > 0:
            raise ValueError(f"output_scale={scale} must be positive")
    elif kind is not source:
        raise TypeError(f"output is {output.dtype}; for states in {source.name} use that, or e4m3")
    elif scale is not None:
        raise ValueError("output_scale belongs to an output in e4m3; drop it")
    assert kind is not None
    return kind


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: Sequence[int] | np.ndarray[Any, Any],
    num_query_heads: int,
    num_kv_heads: int,
    use_alibi: bool,
    use_sliding_window: bool,
    use_local_attention: bool,
    num_sms: int,
    dcp_world_size: int,
) -> bool:
    """Whether vLLM 0.31 would compute a shared prefix once for the whole batch.

    The rule and its cost model are that release's: at least 256 shared tokens and 8 requests, no
    ALiBi, window, local attention or context parallelism; then always, unless a decode batch with
    grouped heads would take no more waves of tiles as plain split decode.

    Parameters
    ----------
    common_prefix_len : int
        Tokens that all requests share.
    query_lens : sequence of int
        Query tokens of each request.
    num_query_heads, num_kv_heads : int
    use_alibi, use_sliding_window, use_local_attention : bool
    num_sms : int
        Multiprocessors of the GPU.
    dcp_world_size : int
        Ranks of the context-parallel group.

    Returns
    -------
    bool
    """
    requests = len(query_lens)
    if common_prefix_len < _SHORTEST_PREFIX or requests < _FEWEST_REQUESTS or dcp_world_size > 1:
        return False
    if use_alibi or use_sliding_window or use_local_attention:
        return False
    group = num_query_heads // num_kv_heads
    if group == 1 or any(n != 1 for n in query_lens):
        return True
    tiles = -(-common_prefix_len // _TILE)
    cascade = -(-num_query_heads * -(-requests // _TILE) // num_sms) * tiles
    decode = -(-requests * num_kv_heads * -(-group // _TILE) * tiles // num_sms)
    return cascade < decode


def cascade_attention(
    output: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    cu_query_lens: Any,
    max_query_len: int,
    cu_prefix_query_lens: Any,
    prefix_kv_lens: Any,
    suffix_kv_lens: Any,
    max_kv_len: int,
    softmax_scale: float,
    alibi_slopes: Any,
    sliding_window: tuple[int, int],
    logits_soft_cap: float,
    block_table: Any,
    common_prefix_len: int,
    max_num_splits: int,
    fa_version: int | None,
    prefix_scheduler_metadata: Any = None,
    suffix_scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    s_aux: Any = None,
    *,
    fp8_dtype: str = "e4m3",
    stream: Any = None,
) -> Any:
    """Causal attention over paged keys whose first blocks all requests share.

    The shared blocks are read once for all queries, without a mask; each request's own keys
    causally; the two states are merged.

    Parameters
    ----------
    output : array [tokens, Hq, Dv]
        Written in place.
    query : array [tokens, Hq, D]
    key_cache, value_cache : array [num_blocks, block_size, Hk, D(v)]
    cu_query_lens : array [batch + 1], int32
    max_query_len : int
    cu_prefix_query_lens : array [2], int32
        ``[0, tokens]``: all queries are one sequence to the prefix.
    prefix_kv_lens : array [1], int32
        ``[common_prefix_len]``.
    suffix_kv_lens : array [batch], int32
        Keys of each request behind the prefix.
    max_kv_len : int
        Bound of the keys of a request, the prefix included.
    softmax_scale : float
    alibi_slopes
        Must be None: the bias counts from each request's own position.
    sliding_window : (int, int)
        Must be (-1, -1).
    logits_soft_cap : float
    block_table : array [batch, max_blocks], int32
    common_prefix_len : int
        A positive multiple of the block size.
    max_num_splits : int
        As ``num_splits`` of both calls.
    fa_version : int, optional
    prefix_scheduler_metadata, suffix_scheduler_metadata : SchedulerMetadata, optional
    q_descale, k_descale, v_descale : array [batch, Hk], float32, or number, optional
        The prefix takes the first request's: requests that share blocks share their scale.
    s_aux : array [Hq], optional
        Sink; merged once.
    fp8_dtype : str
        What uint8 caches hold.
    stream : int or stream, optional

    Returns
    -------
    array [tokens, Hq, Dv]
        ``output``.

    Raises
    ------
    ValueError
        ALiBi, a window, or a prefix that is not whole blocks.
    TypeError, NotImplementedError
        As `flash_attn_varlen_func`.
    """
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes: cascade attention has no ALiBi; attend without cascade")
    if tuple(sliding_window) != (-1, -1):
        raise ValueError(f"sliding_window={sliding_window}: cascade attention takes (-1, -1) only")
    block_size = key_cache.shape[-3]
    if common_prefix_len <= 0 or common_prefix_len % block_size:
        raise ValueError(
            f"common_prefix_len={common_prefix_len} must be a positive multiple of the block size "
            f"{block_size}"
        )
    blocks = common_prefix_len // block_size
    if max_num_splits < 0 or max_kv_len < common_prefix_len:
        raise ValueError(
            f"max_num_splits={max_num_splits} and max_kv_len={max_kv_len} must be at least 0 and "
            f"the prefix, {common_prefix_len}"
        )
    common: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "softcap": logits_soft_cap,
        "return_softmax_lse": True,
        "num_splits": max_num_splits,
        "fa_version": fa_version,
        "fp8_dtype": fp8_dtype,
        "stream": stream,
    }
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    tokens = query.shape[0]
    prefix = flash_attn_varlen_func(
        query, key_cache, value_cache, tokens, cu_prefix_query_lens, common_prefix_len,
        seqused_k=prefix_kv_lens, block_table=block_table[:1, :blocks], causal=False,
        scheduler_metadata=prefix_scheduler_metadata,
        **{name: _first_request(scale) for name, scale in scales.items()}, **common,
    )  # fmt: skip
    suffix = flash_attn_varlen_func(
        query, key_cache, value_cache, max_query_len, cu_query_lens,
        max_kv_len - common_prefix_len, seqused_k=suffix_kv_lens,
        block_table=block_table[:, blocks:], causal=True,
        scheduler_metadata=suffix_scheduler_metadata, **scales, **common,
    )  # fmt: skip
    merge_attn_states(output, *prefix, *suffix, s_aux=s_aux, stream=stream)
    return output


def _first_request(scale: Any) -> Any:
    """The descale of the prefix, which has one request: [1, Hk]."""
    return scale[:1] if scale is not None and getattr(scale, "ndim", 0) == 2 else scale
