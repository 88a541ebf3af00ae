"""Multi-head latent attention: one latent row a token stands for the keys and values of all heads.

A token's cache row is ``[latent, rope]``: the compressed keys and values, then the part of the key
that carries the position. Decoding *absorbs* the up-projections into query and output, and reads
the rows as they are (`mla_decode`); prefill *expands* them to heads (`mla_prefill`), which costs
fewer operations where there are many queries a key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .attention import flash_attn_varlen_func
from .latent_cache import split_latent_cache
from .merge import merge_attn_states
from .runtime.arrays import as_array, on_stream

__all__ = ["ContextChunk", "mla_decode", "mla_prefill"]

Array = Any  # NumPy or CuPy


class ContextChunk(NamedTuple):
    """Expanded keys and values that every query of a request sees.

    Attributes
    ----------
    k : array [total_k, Hq, D]
    v : array [total_k, Hq, Dv]
    cu_seqlens_k : array [batch + 1], int32
    max_seqlen_k : int
    """

    k: Array
    v: Array
    cu_seqlens_k: Array
    max_seqlen_k: int


def mla_decode(
    q_nope: Array,
    q_pe: Array,
    kv_cache: Array,
    block_table: Array,
    seqused_k: Array,
    *,
    cu_seqlens_q: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    out: Array = None,
    lse: Array = None,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    workspace: Array = None,
    batch_invariant: bool = False,
    kv_descale: Any = None,
    stream: Any = None,
) -> Any:
    """Attention of absorbed queries over a paged latent cache.

    It is ``flash_attn_varlen_func(q_pe, rope, latent, ..., q_v=q_nope)`` on views of the cache:
    scores are ``softmax_scale * (q_nope·latent + q_pe·rope)``, values are the latent rows, and each
    row is read once for all heads.

    Parameters
    ----------
    q_nope : array [total_q, Hq, latent_dim], float16 or bfloat16 (NumPy: float32 too)
        Queries in the space of the latent: multiplied by the up-projection of keys already.
    q_pe : array [total_q, Hq, rope_dim]
        Their rotated part.
    kv_cache : array [num_blocks, block_size, 1, latent_dim + rope_dim]
        Or without the axis of heads; 512 + 64 in DeepSeek models. Any block size and strides, the
        last dimension contiguous. Of the queries' type, or e4m3 (uint8).
    block_table : array [batch, max_blocks], int32
    seqused_k : array [batch], int32
        Keys of each request, those of the new tokens included.
    cu_seqlens_q : array [batch + 1], int32
        Where each request's queries start.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths of one request, tokens.
    softmax_scale : float
        That of the heads before absorption: ``(128 + 64) ** -0.5`` in DeepSeek models, times what
        their extension of the context asks for.
    causal, window_size, return_softmax_lse, scheduler_metadata, num_splits, fa_version, workspace
        As in `flash_attn_varlen_func`; `get_scheduler_metadata` is asked with
        ``headdim=rope_dim, headdim_v=latent_dim, num_heads_kv=1``.
    out : array [total_q, Hq, latent_dim], optional
        Where to write.
    lse : array [Hq, total_q], float32, optional
        Where to write the natural log-sum-exp of the scores.
    batch_invariant, stream
        As in `flash_attn_varlen_func`.
    kv_descale : number, or array [1] or [batch, 1], float32, optional
        What the numbers of an e4m3 cache are multiplied by, those of both parts: the ``scale`` that
        `concat_and_cache_mla` was given. 1 if None.

    Returns
    -------
    out : array [total_q, Hq, latent_dim]
        In the space of the latent: the up-projection of values is the caller's.
    lse : array [Hq, total_q], float32
        Only with `return_softmax_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_varlen_func`; or a cache whose rows do not fit the queries.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.ones((2, 16, 1, 576), np.float16)
    >>> starts, used = np.array([0, 1], np.int32), np.array([20], np.int32)
    >>> q_nope, q_pe = np.ones((1, 16, 512), np.float16), np.ones((1, 16, 64), np.float16)
    >>> mla_decode(q_nope, q_pe, cache, np.array([[1, 0]], np.int32), used, cu_seqlens_q=starts,
    ...            max_seqlen_q=1, max_seqlen_k=20, softmax_scale=192**-0.5)[0, 0, 0]
    np.float16(1.0)
    """
    cache = as_array(kv_cache, "kv_cache")
    dims = _width(q_nope, "q_nope"), _width(q_pe, "q_pe")
    width = _width(cache, "kv_cache")
    if width != sum(dims):
        raise ValueError(
            f"kv_cache has rows of {width}, but q_nope and q_pe have {dims[0]} and {dims[1]}; it "
            f"must be {sum(dims)}"
        )
    latent, rope = split_latent_cache(cache, dims[0])
    return flash_attn_varlen_func(
        q_pe,
        rope,
        latent,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        q_v=q_nope,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        block_table=block_table,
        return_softmax_lse=return_softmax_lse,
        out=out,
        lse=lse,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        fa_version=fa_version,
        workspace=workspace,
        k_descale=kv_descale,
        v_descale=kv_descale,
        batch_invariant=batch_invariant,
        stream=stream,
    )


def _width(array: Any, name: str) -> int:
    """The last dimension of an array of any library."""
    shape = array.shape if hasattr(array, "shape") else as_array(array, name).shape
    if not shape:
        raise ValueError(f"{name} has shape (); its rows must be the last dimension")
    return int(shape[-1])


def mla_prefill(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    max_seqlen_q: int,
    *,
    softmax_scale: float,
    contexts: Iterable[ContextChunk] = (),
    causal: bool = True,
    return_softmax_lse: bool = False,
    out: Array = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    batch_invariant: bool = False,
    stream: Any = None,
) -> Any:
    """Attention of new tokens over themselves and over chunks of what came before.

    Parameters
    ----------
    q, k : array [total_q, Hq, D]
        New tokens, expanded to heads: 128 + 64 in DeepSeek models.
    v : array [total_q, Hq, Dv]
    cu_seqlens_q : array [batch + 1], int32
        Where each request's new tokens start, in q, k and v.
    max_seqlen_q : int
    softmax_scale : float
    contexts : iterable of ContextChunk
        Earlier keys of the same requests, taken one at a time, so that they may be expanded only
        then. Every query sees all of them. A request without keys in a chunk is empty there.
    causal, return_softmax_lse, num_splits, fa_version, batch_invariant, stream
        As in `flash_attn_varlen_func`.
    out : array [total_q, Hq, Dv], optional
        Where to write.

    Returns
    -------
    out : array [total_q, Hq, Dv]
    lse : array [Hq, total_q], float32
        Only with `return_softmax_lse`: over the new tokens and all chunks.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_varlen_func`.
    """
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "return_softmax_lse": True,
        "num_splits": num_splits,
        "fa_version": fa_version,
        "batch_invariant": batch_invariant,
        "stream": stream,
    }
    out, lse = flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_q, cu_seqlens_q, causal=causal, out=out,
        **options,
    )  # fmt: skip
    context: tuple[Array, Array] | None = None
    wide = False
    for chunk in contexts:
        found = flash_attn_varlen_func(
            q, chunk.k, chunk.v, max_seqlen_q, cu_seqlens_q, chunk.max_seqlen_k,
            chunk.cu_seqlens_k, **options,
        )  # fmt: skip
        if context is not None:
            # Rounding each partial merge to 16 bits would add up over the chunks.
            context = context if wide else _widened(context, stream)
            wide = True
            found = _widened(found, stream)
            merge_attn_states(context[0], *context, *found, context[1], stream=stream)
        else:
            context = found
    if context is not None and wide:
        new = _widened((out, lse), stream)
        merge_attn_states(new[0], *context, *new, lse, stream=stream)
        with on_stream(out, stream):
            out[...] = new[0].astype(out.dtype)
    elif context is not None:
        merge_attn_states(out, *context, out, lse, lse, stream=stream)
    return (out, lse) if return_softmax_lse else out


def _widened(state: tuple[Array, Array], stream: Any) -> tuple[Array, Array]:
    with on_stream(state[0], stream):
        return state[0].astype(np.float32), state[1]
