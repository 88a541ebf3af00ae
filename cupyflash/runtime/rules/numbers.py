"""Numbers and flags that must be known on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["MOST_TOKENS", "flag", "name_of_type", "non_negative", "number", "token_bound"]

MOST_TOKENS = 1 << 30
"""Of one request: kernels count its keys and positions in 32 bits."""

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def number(name: str, value: Any) -> float:
    """A real number, finite in float32: Python's, NumPy's, or a 0-d NumPy array.

    Raises
    ------
    TypeError
        It is an array on a GPU (reading it would synchronise), or not a real number.
    ValueError
        It is not finite.
    """
    if type(value) is not float:
        value = _host_scalar(name, value, (int, float, np.integer, np.floating), "number")
    try:
        found = float(value)
    except OverflowError:  # of an int
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name}={value} must be finite")
    if abs(found) > _LARGEST_FLOAT32:
        raise ValueError(f"{name}={value} must be finite in float32, at most {_LARGEST_FLOAT32}")
    return found


def non_negative(name: str, value: Any) -> int:
    """An integer of at least 0.

    Raises
    ------
    TypeError
        It is not an integer that is known on the host.
    ValueError
        It is negative.
    """
    found = int(_host_scalar(name, value, (int, np.integer), "integer"))
    if found < 0:
        raise ValueError(f"{name}={found} must be at least 0")
    return found


def token_bound(name: str, value: Any) -> int:
    """An upper bound of the tokens of a request.

    Raises
    ------
    TypeError
        It is not an integer that is known on the host.
    ValueError
        It is negative, or more than a request may have.
    """
    found = non_negative(name, value)
    if found > MOST_TOKENS:
        raise ValueError(
            f"{name}={found}: a request has at most {MOST_TOKENS} tokens; pass the bound of yours"
        )
    return found


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises
    ------
    TypeError
        It is anything else; an array, for example, of one flag a request.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is {type(value).__name__}; it must be True or False for all requests")


def name_of_type(name: str, value: Any) -> str:
    """A string; format names are looked up elsewhere."""
    if isinstance(value, str):
        return value
    raise TypeError(f'{name} is {type(value).__name__}; it must be a string such as "e4m3"')


def _host_scalar(name: str, value: Any, kinds: tuple[type, ...], what: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim:
            raise TypeError(f"{name} has shape {value.shape}; pass one {what}")
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(
            f"{name} is {type(value).__name__}; pass a Python or NumPy {what} (an array on a GPU "
            "would have to be read: convert it once, outside of the loop)"
        )
    return value
