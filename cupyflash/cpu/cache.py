"""Writing new keys and values to a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.runtime.dtypes import ScalarType

from .convert import Array, round_to_fp8, storage

__all__ = ["check_slots", "write_cache"]

_TOKENS = 4096


def write_cache(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    cache_type: ScalarType,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Store token ``t`` at slot ``slot_mapping[t]``; arguments are validated.

    Parameters
    ----------
    key, value : ndarray [tokens or more, num_heads_kv, head_dim(_v)]
    key_cache, value_cache : ndarray [num_blocks, block_size, num_heads_kv, head_dim(_v)]
        Any strides. fp8 may be held as uint8.
    slot_mapping : ndarray [tokens], int32 or int64
        ``block * block_size + offset``; negative = skip the token.
    cache_type : ScalarType
    k_scale, v_scale : scalar, or ndarray of one or num_heads_kv float32
        fp8 only: values are divided by it, rounded to nearest even and saturated.

    Raises
    ------
    ValueError
        A slot past the end of the cache; nothing is written.
    """
    slots = slot_mapping.astype(np.int64)
    num_blocks, block_size = key_cache.shape[:2]
    check_slots(slots, num_blocks, block_size)
    live = np.flatnonzero(slots >= 0)
    for start in range(0, len(live), _TOKENS):
        tokens = live[start : start + _TOKENS]
        index = np.divmod(slots[tokens], block_size)
        for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            storage(cache, cache_type)[index] = _convert(new[tokens], cache_type, scale)


def check_slots(slots: Array, num_blocks: int, block_size: int) -> None:
    """Refuse slots past the end of the cache; negative ones are skipped elsewhere."""
    if slots.size and slots.max() >= num_blocks * block_size:
        raise ValueError(
            f"slot_mapping[{int(slots.argmax())}]={slots.max()} must be less than "
            f"{num_blocks * block_size}, the slots of the cache ({num_blocks} blocks of "
            f"{block_size})"
        )


def _convert(new: Array, cache_type: ScalarType, scale: Any) -> Array:
    if not cache_type.is_fp8:
        return new.astype(cache_type.numpy)
    per_head = np.asarray(1 if scale is None else scale, np.float32).reshape(-1, 1)
    with np.errstate(all="ignore"):
        return round_to_fp8(new.astype(np.float32) / per_head, cache_type)
