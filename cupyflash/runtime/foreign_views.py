"""Foreign GPU arrays in a warm call: looked at in their library's quickest way, kept by address.

A view does not own its memory: it serves while its array's owner is in the call, and again for
any array that lies there alike. What has no quick way, or nothing to show, goes through
`foreign.adopt`, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .foreign import CUDA, Consumer, adopt, dlpack_device
from .foreign_interface import view_of_interface
from .foreign_jax import view_of_jax
from .foreign_numba import view_of_numba
from .foreign_torch import Tensors

__all__ = ["FOREIGN", "gpu_views"]

FOREIGN: set[Any] = set()
"""Types whose arrays were foreign before: calls on them look for views first."""


def gpu_views(given: Sequence[Any], names: Sequence[str], stream: Any) -> tuple[Any, ...] | None:
    """The arguments with every foreign array on a GPU as a CuPy array; None if there is none.

    Parameters
    ----------
    given : sequence
        Arrays of any library, and what is no array; neither is looked at closely.
    names : sequence of str
        What each is called, for messages.
    stream : int or stream, optional
        Where the call goes: work of other streams on the arrays is ordered before it.

    Raises
    ------
    TypeError, ValueError
        As `foreign.adopt`.
    """
    found: list[Any] | None = None
    consumer, looks = Consumer(stream), _looks
    for i, value in enumerate(given):
        if value is None:
            continue
        look = looks.get(type(value)) or _new_look(value)
        if look is _not_foreign:
            continue
        view = look(value, names[i], consumer)
        if view is None:
            device = dlpack_device(value, names[i])
            if device is not None and device[0] != CUDA:
                continue
            view = adopt(value, names[i], consumer)
        if found is None:
            found = list(given)
        found[i] = view
    return None if found is None else tuple(found)


Look = Callable[[Any, str, Consumer], Any]


def _not_foreign(value: Any, name: str, consumer: Consumer) -> None:
    """Of CuPy, NumPy, or no array at all."""


def _no_quick_way(value: Any, name: str, consumer: Consumer) -> None:
    """It has to be adopted, if it is on a GPU."""


_looks: dict[Any, Look] = {}


def _new_look(value: Any) -> Look:
    kind = type(value)
    look = _looks.setdefault(kind, _look_of(value))
    if look is not _not_foreign:
        FOREIGN.add(kind)
    return look


def _look_of(value: Any) -> Look:
    """How arrays of a type are looked at: a view, or None where they have to be adopted."""
    library = type(value).__module__.partition(".")[0]
    if library == "cupy" or isinstance(value, (np.ndarray, np.generic)):
        return _not_foreign
    if library in ("jax", "jaxlib") and hasattr(value, "_pjrt_layout"):
        return view_of_jax
    if library == "torch" and hasattr(value, "data_ptr"):
        return Tensors().view
    if hasattr(value, "__dlpack__"):
        return _no_quick_way
    # Of a type that has it, an array on a CPU may say no.
    if not any(hasattr(one, "__cuda_array_interface__") for one in (value, type(value))):
        return _not_foreign
    has_parts = all(hasattr(value, part) for part in ("gpu_data", "shape", "strides", "dtype"))
    return view_of_numba if library.startswith("numba") and has_parts else view_of_interface
