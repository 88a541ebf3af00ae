"""In which type the kernels that serve a call round the weights of keys."""

from __future__ import annotations

from typing import Any

from cupyflash.explain import explain

__all__ = ["weight_precision"]


def weight_precision(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """What ``expect_attention`` must know of the kernels: its ``p_dtype`` where they have 8 bits.

    Parameters
    ----------
    *args, **kwargs
        Those of the call of ``flash_attn_varlen_func``, arrays on the device that it runs on.
    """
    names = ("q", "k", "v")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given["q"].dtype.itemsize > 1 or given["k"].dtype.itemsize > 1:
        return {}
    found = explain(*args, **kwargs)
    return {"p_dtype": "e4m3"} if found.kernels.startswith("Hopper 8-bit prefill") else {}
