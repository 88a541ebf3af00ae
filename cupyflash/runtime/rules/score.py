"""What happens to a score: window, soft cap, ALiBi, sink, descales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyflash.runtime.arrays import ArraySpec
from cupyflash.runtime.dtypes import ScalarType, scalar_type

from .numbers import MOST_TOKENS, number
from .operands import check_operand

__all__ = [
    "check_alibi",
    "check_descales",
    "check_scale",
    "check_sink",
    "check_softcap",
    "sides",
    "window",
]


def window(window_size: Any, causal: bool) -> tuple[int, int]:
    """The inclusive reach to the left and right; -1 is open, causal closes the right.

    A side that reaches past every request is open.
    """
    window_size = sides(window_size)
    if window_size is None:
        return -1, 0 if causal else -1
    if len(window_size) != 2 or not all(
        isinstance(side, (int, np.integer)) for side in window_size
    ):
        raise ValueError(f"window_size={window_size} must be two integers (left, right)")
    left, right = int(window_size[0]), int(window_size[1])
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size={window_size}: a side is the number of keys to see there, or -1 for all; "
            f"the nearest is ({max(left, -1)}, {max(right, -1)})"
        )
    left, right = (-1 if side >= MOST_TOKENS else side for side in (left, right))
    return left, 0 if causal else right


def sides(window_size: Any) -> tuple[Any, ...] | None:
    """A window as a tuple, which has a hash; a list is one too."""
    if window_size is None:
        return None
    try:
        return tuple(window_size)
    except TypeError:
        raise ValueError(f"window_size={window_size} must be two integers (left, right)") from None


_SOFTCAPS = 1e-30, 1e30  # scores are divided by it, and multiplied


def check_softcap(softcap: float) -> None:
    if softcap < 0:
        raise ValueError(f"softcap={softcap} must be positive, or 0 for none")
    least, most = _SOFTCAPS
    if softcap and not least <= softcap <= most:
        raise ValueError(
            f"softcap={softcap} must be 0 for none, or from {least} to {most}; the nearest is "
            f"{min(max(softcap, least), most)}"
        )


def check_scale(softmax_scale: float, descales: tuple[Any, ...]) -> None:
    """The scale of the scores with the descales that are numbers is one of float32."""
    given = {"softmax_scale": softmax_scale, "q_descale": descales[0], "k_descale": descales[1]}
    numbers = {name: value for name, value in given.items() if isinstance(value, float)}
    number(" * ".join(numbers), math.prod(numbers.values()))


def check_alibi(slopes: ArraySpec | None, batch: int, heads_q: int) -> None:
    """One slope a query head, or one a request and query head."""
    if slopes is None:
        return
    if slopes.dtype != np.float32:
        raise TypeError(f"alibi_slopes is {slopes.dtype}; it must be float32")
    if slopes.shape not in ((heads_q,), (batch, heads_q)):
        raise ValueError(
            f"alibi_slopes has shape {slopes.shape}; it must be [{heads_q}] or [{batch}, {heads_q}]"
        )
    check_operand("alibi_slopes", slopes, str(list(slopes.shape)))


def check_sink(s_aux: ArraySpec | None, heads_q: int) -> None:
    """One logit a query head."""
    if s_aux is None:
        return
    kind = scalar_type(s_aux.dtype)
    if kind is None or kind.is_fp8:
        raise TypeError(f"s_aux is {s_aux.dtype}; use float32, float16 or bfloat16")
    if s_aux.shape != (heads_q,):
        raise ValueError(f"s_aux has shape {s_aux.shape}; it must be [{heads_q}], one a query head")
    check_operand("s_aux", s_aux, f"[{heads_q}]")


def check_descales(
    descales: tuple[Any, ...], q_type: ScalarType, kv_type: ScalarType, batch: int, heads_kv: int
) -> None:
    """Descales belong to 8-bit operands: float32 [batch, Hk] of any stride, [1], or a number.

    ``descales`` holds, for q, k and v, None, a number, or the spec of an array.
    """
    for operand, given, kind in zip("qkv", descales, (q_type, kv_type, kv_type), strict=True):
        if given is None:
            continue
        name = f"{operand}_descale"
        if not kind.is_fp8:
            raise ValueError(
                f"{name} given, but {operand} is {kind.name}; a descale belongs to fp8, drop it"
            )
        if not isinstance(given, tuple):
            continue
        spec = ArraySpec(*given)
        if spec.dtype != np.float32:
            raise TypeError(f"{name} is {spec.dtype}; it must be float32")
        if spec.shape not in ((), (1,), (batch, heads_kv)):
            raise ValueError(
                f"{name} has shape {spec.shape}; it must be {(batch, heads_kv)} "
                "(batch, num_heads_kv), [1] or a number"
            )
