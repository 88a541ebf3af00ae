"""Writing new tokens to the KV cache."""

from __future__ import annotations

from typing import Any

from . import cpu
from .runtime import env
from .runtime.arrays import place, specs
from .runtime.call import scale_argument
from .runtime.foreign_views import gpu_views
from .runtime.gpu_key import gpu_key
from .runtime.nvtx import call_range
from .runtime.rules.cache import WRITE_ARRAYS, check_write
from .runtime.write_launch import write_cache, write_known
from .values import check_slot_values

__all__ = ["reshape_and_cache_flash"]


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
    seen = None
    if type(kv_cache_dtype) is str and key_cache is not None and not (env.check() or env.debug()):
        seen = gpu_key((*given, k_scale, v_scale), kv_cache_dtype)
        if seen is None and (views := gpu_views(given, WRITE_ARRAYS, stream)):
            given, seen = views, gpu_key((*views, k_scale, v_scale), kv_cache_dtype)
        if seen is not None and write_known(seen, given, (k_scale, v_scale), stream):
            return
    k_number, k_array = _scale("k_scale", k_scale, stream)
    v_number, v_array = _scale("v_scale", v_scale, stream)
    arrays, on_host = place(WRITE_ARRAYS, (*given, k_array, v_array), stream, len(given))
    shapes, numbers = specs(arrays), (k_number, v_number)
    cache_type = check_write(shapes, numbers, kv_cache_dtype)
    if on_host:
        if stream is not None:
            raise ValueError("stream given, but NumPy arrays are written before the call returns")
        *placed, k_array, v_array = arrays
        cpu.write_cache(
            *placed,
            cache_type=cache_type,
            k_scale=k_number if k_array is None else k_array,
            v_scale=v_number if v_array is None else v_array,
        )  # type: ignore[misc]
        return
    if env.check():
        check_slot_values(arrays[4], *arrays[2].shape[:2])
    written = (tuple(arrays), shapes, numbers, cache_type, stream, seen)
    if env.debug():
        with call_range(f"reshape_and_cache_flash, {arrays[4].shape[0]} slots"):
            write_cache(*written)
    else:
        write_cache(*written)


def _scale(name: str, value: Any, stream: Any) -> tuple[float, Any]:
    """A number, and the array that takes its place."""
    found = 1.0 if value is None else scale_argument(name, value, stream)
    return (found, None) if isinstance(found, float) else (1.0, found)
