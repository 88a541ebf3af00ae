"""Queries, keys and values in 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cpu.quantize import quantize as quantize_on_cpu
from .runtime.arrays import ArraySpec, array_module, on_stream, place, spec_of
from .runtime.call import scale_argument
from .runtime.dtypes import ScalarType, parse_fp8, scalar_type
from .runtime.quantize_launch import quantize
from .runtime.rules.operands import check_operand

__all__ = ["quantize_fp8"]

_GRANULARITIES = ("tensor", "head", "group")
_MOST_ROWS = 1 << 31
_ROTATED = (64, 128, 256)


def quantize_fp8(
    x: Any,
    granularity: str = "tensor",
    *,
    num_heads_kv: int | None = None,
    scale: Any = None,
    fp8_dtype: str = "e4m3",
    hadamard: bool = False,
    out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Values over a scale, rounded to nearest even in an 8-bit float and saturated.

    NaN stays NaN; infinities become the largest finite value. ``x ~ out * scale``, so the scale is
    what attention takes as ``q_descale``, ``k_descale`` or ``v_descale``, once it is broadcast to
    ``[batch, num_heads_kv]``, and ``reshape_and_cache_flash`` as ``k_scale`` or ``v_scale``.

    Parameters
    ----------
    x : array [tokens, num_heads, head_dim], float16, bfloat16 or float32
        Any strides, the last dimension contiguous.
    granularity : str
        What shares a scale: ``"tensor"``, all of x; ``"head"``, each head; ``"group"``, the query
        heads of one KV head, as descales of queries are given.
    num_heads_kv : int, optional
        For ``"group"``: how many groups there are.
    scale : number, or array [1] or [groups], float32, optional
        Static scales. If None each is the largest finite absolute value of what shares it over
        that of the format (448 or 57344), and 1 where all is 0.
    fp8_dtype : str
        ``"e4m3"``, ``"e5m2"`` or another spelling of these.
    hadamard : bool, default False
        Multiply each row by a fixed diagonal of signs and a Hadamard matrix over its root first:
        for q and k alike, whose products it leaves as they are while it spreads what single
        elements hold. ``head_dim`` is 64, 128 or 256. A row with NaN or infinities becomes NaN.
    out : array [tokens, num_heads, head_dim], uint8 or the ml_dtypes type, optional
    stream : int or stream, optional
        The current stream of the device of x if None. The CPU has none.

    Returns
    -------
    out : array [tokens, num_heads, head_dim]
        uint8 if it was not given.
    scale : array [groups], float32; groups is 1, num_heads or num_heads_kv
        Found ones in an array of their own; given ones as they are, a number as an array.

    Raises
    ------
    TypeError
        A dtype, or arrays on the CPU and on a GPU in one call.
    ValueError
        A shape, the granularity, a scale that is not positive, or ``stream`` on the CPU.
    CaptureError
        ``out`` or the scales would be allocated while the stream is captured.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.array([[[1.0, -2.0], [0.5, 0.25]]], np.float32)
    >>> bits, scale = quantize_fp8(q, "head")
    >>> scale * 448
    array([2. , 0.5], dtype=float32)
    >>> bits
    array([[[118, 254],
            [126, 118]]], dtype=uint8)
    """
    if x is None:
        raise TypeError("x is None; it must be an array")
    number = scale_argument("scale", scale, stream)
    given = None if number is None or isinstance(number, float) else number
    (x, out, given), on_host = place(("x", "out", "scale"), (x, out, given), stream)
    if on_host and stream is not None:
        raise ValueError("stream given, but NumPy arrays are converted before the call returns")
    spec = spec_of(x)
    assert spec is not None
    kind = parse_fp8(fp8_dtype)
    groups = _groups(spec, granularity, num_heads_kv)
    _check(spec, spec_of(out), kind)
    if hadamard and spec.shape[2] not in _ROTATED:
        raise ValueError(
            f"hadamard=True with head_dim={spec.shape[2]}; "
            f"it is for {', '.join(map(str, _ROTATED))}"
        )
    if isinstance(number, float):
        if not 0 < number < float("inf"):
            raise ValueError(f"scale={number} must be positive")
    elif given is not None:
        _check_scale(spec_of(given), groups)
    xp = array_module(x)
    with on_stream(x, stream):
        if out is None:
            out = xp.empty(x.shape, np.uint8)
        made = xp.empty(groups, np.float32) if number is None else None
    scales = number if given is None else given
    if on_host:
        quantize_on_cpu(x, out, scales, made, kind, hadamard)
    else:
        quantize(x, out, scales, made, groups, kind, hadamard, stream)
    if made is not None:
        return out, made
    if given is not None:
        return out, given
    with on_stream(x, stream):
        return out, xp.full(1, number, np.float32)


def _groups(spec: ArraySpec, granularity: str, num_heads_kv: int | None) -> int:
    _, heads, _ = check_operand("x", spec, "[tokens, heads, D]")
    if granularity not in _GRANULARITIES:
        raise ValueError(
            f"granularity={granularity!r} is none of {', '.join(map(repr, _GRANULARITIES))}"
        )
    if granularity != "group":
        if num_heads_kv is not None:
            raise ValueError(
                f"num_heads_kv={num_heads_kv} with granularity={granularity!r}; it belongs to "
                '"group", drop it'
            )
        return 1 if granularity == "tensor" else heads
    if not isinstance(num_heads_kv, (int, np.integer)) or num_heads_kv < 1 or heads % num_heads_kv:
        raise ValueError(
            f"num_heads_kv={num_heads_kv} must divide the {heads} heads of x: heads that share a "
            "KV head share a scale"
        )
    return int(num_heads_kv)


def _check(spec: ArraySpec, out: ArraySpec | None, kind: ScalarType) -> None:
    source = scalar_type(spec.dtype)
    if source is None or source.is_fp8:
        raise TypeError(f"x is {spec.dtype}; use float16, bfloat16 or float32")
    if spec.shape[0] * spec.shape[1] >= _MOST_ROWS:
        raise ValueError(f"x has shape {spec.shape}: at most 2^31 rows of a head")
    if out is None:
        return
    if out.dtype != np.uint8 and scalar_type(out.dtype) is not kind:
        raise TypeError(f"out is {out.dtype}; use uint8 or {kind.numpy}")
    if tuple(out.shape) != tuple(spec.shape) or not out.unit_stride or out.overlaps:
        raise ValueError(
            f"out has shape {out.shape} and strides {out.strides}; it must be {list(spec.shape)}, "
            "its last dimension contiguous, no two elements in one place"
        )


def _check_scale(scale: ArraySpec | None, groups: int) -> None:
    assert scale is not None
    if scale.dtype != np.float32:
        raise TypeError(f"scale is {scale.dtype}; it must be float32")
    if scale.shape not in ((1,), (groups,)):
        raise ValueError(f"scale has shape {scale.shape}; it must be [{groups}], [1] or a number")
