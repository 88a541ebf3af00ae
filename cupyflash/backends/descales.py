"""The scales of 8-bit operands, as a call takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.backend import AttentionLayer
from cupyflash.runtime.arrays import array_module
from cupyflash.runtime.dtypes import scalar_type

__all__ = ["descale_arguments"]

Array = Any  # NumPy or CuPy


def descale_arguments(
    layer: AttentionLayer, query: Array, kv_format: str, requests: int, num_kv_heads: int
) -> dict[str, Any]:
    """Scales and formats of the 8-bit operands, as keyword arguments of a call.

    Parameters
    ----------
    layer : AttentionLayer
        Scales of other operands are not read.
    query : array
        uint8 is e4m3, which is what queries are quantised to.
    kv_format : str
        ``"e4m3"`` or ``"e5m2"``; empty = the cache is not 8-bit.
    requests, num_kv_heads : int
        The shape of a scale, made without a copy: stride 0 over the requests.

    Returns
    -------
    dict
    """
    shape, found = (requests, num_kv_heads), {}
    if query.dtype.itemsize == 1:
        kind = scalar_type(query.dtype)
        found["q_fp8_dtype"] = "e4m3" if kind is None else kind.name
        found["q_descale"] = _expand(layer._q_scale, shape)
    if kv_format:
        found["fp8_dtype"] = kv_format
        found["k_descale"] = _expand(layer._k_scale, shape)
        found["v_descale"] = _expand(layer._v_scale, shape)
    return found


def _expand(scale: Any, shape: tuple[int, int]) -> Any:
    """A number as it is; an array of one element or one a head as [requests, num_kv_heads]."""
    if not hasattr(scale, "shape") or isinstance(scale, np.generic):
        return float(scale)
    return array_module(scale).broadcast_to(scale.reshape(-1), shape)
