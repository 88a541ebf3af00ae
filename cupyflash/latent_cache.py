"""The cache of multi-head latent attention: a latent and a rope part a token."""

from __future__ import annotations

from typing import Any

import numpy as np

from .kv_cache import reshape_and_cache_flash
from .runtime.arrays import array_module, as_array, on_stream

__all__ = ["concat_and_cache_mla", "gather_latent_cache", "split_latent_cache"]

Array = Any  # NumPy or CuPy


def split_latent_cache(kv_cache: Array, latent_dim: int) -> tuple[Array, Array]:
    """The latent and the rope part of a cache, [num_blocks, block_size, 1, ...] each, as views.

    Parameters
    ----------
    kv_cache : array [num_blocks, block_size, 1, latent_dim + rope_dim]
        Or without the axis of heads. Any strides, the last dimension contiguous.
    latent_dim : int

    Raises
    ------
    ValueError
        Another shape.
    """
    shape = kv_cache.shape
    if len(shape) == 3:
        kv_cache = kv_cache[:, :, None]
    elif len(shape) != 4 or shape[2] != 1:
        raise ValueError(
            f"kv_cache has shape {shape}; it must be [num_blocks, block_size, 1, latent + rope], "
            "or the same without the 1"
        )
    if shape[-1] <= latent_dim:
        raise ValueError(
            f"kv_cache has rows of {shape[-1]}, but the latent part alone has {latent_dim}; rows "
            "must hold the latent and then the rope part"
        )
    return kv_cache[..., :latent_dim], kv_cache[..., latent_dim:]


def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str,
    scale: Any,
    *,
    stream: Any = None,
) -> None:
    """Store the latent and rope parts of new tokens at their slots of a latent cache.

    Parameters
    ----------
    kv_c : array [tokens, latent_dim], float16, bfloat16 or float32
        At least as many tokens as `slot_mapping`; more are padding and are not read.
    k_pe : array [tokens, rope_dim] or [tokens, 1, rope_dim]
    kv_cache : array [num_blocks, block_size, 1, latent_dim + rope_dim]
        Or without the axis of heads. Written in place; any strides, the last dimension contiguous.
    slot_mapping : array [num_slots], int32 or int64
        ``block * block_size + offset`` of each token; negative = skip the token.
    kv_cache_dtype : str
        As in `reshape_and_cache_flash`.
    scale : number, or array [1], float32
        fp8 caches store ``x / scale``, both parts; 1 otherwise. None = 1.
    stream : int or stream, optional
        The current stream of the arrays' device if None.

    Raises
    ------
    TypeError, ValueError
        As `reshape_and_cache_flash`.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((2, 4, 576), np.float16)
    >>> latent, rope = np.ones((2, 512), np.float16), np.ones((2, 64), np.float16)
    >>> concat_and_cache_mla(latent, rope, cache, np.array([5, -1]), "auto", 1.0)
    >>> np.flatnonzero(cache.reshape(8, 576).all(-1))
    array([5])
    """
    latent, rope = as_array(kv_c, "kv_c"), as_array(k_pe, "k_pe")
    if latent.ndim != 2:
        raise ValueError(f"kv_c has shape {latent.shape}; it must be [tokens, latent]")
    if rope.ndim == 2:
        rope = rope[:, None]
    parts = split_latent_cache(as_array(kv_cache, "kv_cache"), latent.shape[1])
    reshape_and_cache_flash(
        latent[:, None], rope, *parts, slot_mapping, kv_cache_dtype, scale, scale, stream=stream
    )


def gather_latent_cache(
    kv_cache: Array,
    block_table: Array,
    cu_seqlens: Array,
    total: int,
    seq_starts: Array = None,
    *,
    stream: Any = None,
) -> Array:
    """Rows of a latent cache, request after request: what prefill expands of a context.

    Parameters
    ----------
    kv_cache : array [num_blocks, block_size, 1, latent_dim + rope_dim]
        Or without the axis of heads.
    block_table : array [batch, max_blocks], int32
    cu_seqlens : array [batch + 1], int32
        Where each request's rows go; request i has ``cu_seqlens[i + 1] - cu_seqlens[i]`` of them.
    total : int
        ``cu_seqlens[-1]``, known on the host.
    seq_starts : array [batch], int32, optional
        The token of each request that is gathered first; 0 if None.
    stream : int or stream, optional

    Returns
    -------
    array [total, latent_dim + rope_dim]
    """
    xp = array_module(kv_cache)
    rows = kv_cache.reshape(*kv_cache.shape[:2], -1)
    block_size = rows.shape[1]
    with on_stream(kv_cache, stream):
        index = xp.arange(total, dtype=np.int32)
        request = xp.searchsorted(cu_seqlens[1:], index, side="right")
        token = index - cu_seqlens[request]
        if seq_starts is not None:
            token = token + seq_starts[request]
        block = block_table[request, token // block_size]
        # As integers: an index does not care what a row holds.
        whole = rows.view(f"u{rows.dtype.itemsize}")
        return whole[block, token % block_size].view(rows.dtype)
