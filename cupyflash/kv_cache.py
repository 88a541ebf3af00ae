"""Writing new tokens to the KV cache."""

from __future__ import annotations

from typing import Any

from . import cpu
from .runtime import env
from .runtime.arrays import ArraySpec, place
from .runtime.call import scale_argument
from .runtime.rules.cache import check_write
from .values import check_slot_values

__all__ = ["reshape_and_cache_flash"]

_ARRAYS = ("key", "value", "key_cache", "value_cache", "slot_mapping")
_SCALES = ("k_scale", "v_scale")


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    *,
    stream: Any = None,
) -> None:
    """Store the keys and values of new tokens at their slots of a paged cache.

    Parameters
    ----------
    key, value : array [tokens, Hk, D], [tokens, Hk, Dv], float16, bfloat16 or float32
        At least as many tokens as `slot_mapping`; more are padding and are not read.
    key_cache, value_cache : array [num_blocks, block_size, Hk, D], [..., Dv]
        Written in place; any strides, the last dimension contiguous. float16, bfloat16 or float32;
        or fp8, as uint8 or an ml_dtypes type.
    slot_mapping : array [num_slots], int32 or int64
        ``block * block_size + offset`` of each token; negative = skip the token. A slot given
        twice ends up with one of its tokens.
    kv_cache_dtype : str
        ``"auto"``: the caches' dtype, which is that of key and value, or narrower than float32;
        ``"float16"``, ``"bfloat16"``: caches of this dtype, whatever key and value are; ``"fp8"``,
        ``"fp8_e4m3"``, ``"fp8_e5m2"``: the format of caches in uint8 or that ml_dtypes type.
    k_scale, v_scale : number, or array [1] or [Hk], float32
        fp8 caches store ``x / scale``, to nearest even, saturated (infinities too); NaN stays NaN.
        Not used by other caches, where a number must be 1. None = 1.
    stream : int or stream, optional
        The current stream of the arrays' device if None. The CPU has none.

    Raises
    ------
    TypeError
        A dtype, or arrays on the CPU and on a GPU in one call.
    ValueError
        A shape, an unknown spelling, a scale that is not positive or has no use, or a slot past
        the end of the cache (on a GPU under ``CUPYFLASH_CHECK=1`` only).

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((2, 2, 4, 1, 8), np.float16)
    >>> new = np.ones((3, 1, 8), np.float16)
    >>> slots = np.array([5, -1, 0])
    >>> reshape_and_cache_flash(new, new, cache[0], cache[1], slots, "auto", 1.0, 1.0)
    >>> np.flatnonzero(cache[0, :, :, 0, 0])
    array([0, 5])
    """
    given = (key, value, key_cache, value_cache, slot_mapping)
    for name, array in zip(_ARRAYS, given, strict=True):
        if array is None:
            raise TypeError(f"{name} is None; it must be an array")
    scales = [
        1.0 if s is None else scale_argument(n, s)
        for n, s in zip(_SCALES, (k_scale, v_scale), strict=True)
    ]
    extra = [None if isinstance(s, float) else s for s in scales]
    placed, on_host = place((*_ARRAYS, *_SCALES), (*given, *extra))
    arrays = dict(zip(_ARRAYS, placed, strict=False))
    scales = [s if a is None else a for s, a in zip(scales, placed[5:], strict=True)]
    cache_type = check_write(
        {n: ArraySpec(a.shape, a.dtype, a.strides) for n, a in arrays.items()},
        {n: s if isinstance(s, float) else ArraySpec(s.shape, s.dtype, s.strides)
         for n, s in zip(_SCALES, scales, strict=True)},
        kv_cache_dtype,
    )  # fmt: skip
    if on_host:
        if stream is not None:
            raise ValueError("stream given, but NumPy arrays are written before the call returns")
        cpu.write_cache(**arrays, cache_type=cache_type, k_scale=scales[0], v_scale=scales[1])
        return
    if env.check():
        check_slot_values(arrays["slot_mapping"], *arrays["key_cache"].shape[:2])
    from .runtime.small_kernels import write_cache

    write_cache(
        **arrays, cache_type=cache_type, k_scale=scales[0], v_scale=scales[1], stream=stream
    )
