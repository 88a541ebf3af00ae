"""Launching ``merge_attn_states``; arguments are validated already."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from .compile import native_arch
from .device import Device, device_for
from .dtypes import ScalarType, scalar_type
from .gpu_key import Known
from .merge_plan import MERGE_PARAMS, make_merge_plan
from .overlap import Footprint, check_in_place, footprint
from .row_kernel import RowShape

__all__ = ["merge_known", "merge_states"]

_NAMES = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse")
_OUT, _PREFIX, _PREFIX_LSE, _SUFFIX, _SUFFIX_LSE, _OUT_LSE = range(6)
_IN_PLACE = ((_OUT, _PREFIX), (_OUT, _SUFFIX), (_OUT_LSE, _PREFIX_LSE), (_OUT_LSE, _SUFFIX_LSE))


class _Shape(NamedTuple):
    tokens: int
    rows: RowShape
    footprints: tuple[Footprint, ...]


_known: Known[_Shape] = Known()


def merge_known(
    key: Any, arrays: tuple[Any, ...], prefix_tokens: int | None, scale: Any, stream: Any
) -> bool:
    """Queue a merge that `merge_states` has seen the like of; False where it has not.

    Parameters
    ----------
    key
        `gpu_key.gpu_key` of the arguments.
    arrays : tuple
        Without the scale.
    prefix_tokens : int, optional
        At least 0; all if None.
    scale : float or array, optional
    stream : int, stream or None

    Raises
    ------
    ValueError
        As `merge_states`.
    """
    device = device_for(arrays[0])
    shape = _known.get(key, device)
    if shape is None:
        return False
    tokens = shape.tokens if prefix_tokens is None else min(shape.tokens, prefix_tokens)
    number, in_memory = (scale, None) if type(scale) is float else (None, scale)
    _queue(shape, device, (*arrays, in_memory), tokens, number, stream)
    return True


def merge_states(
    arrays: tuple[Any, ...],
    specs: tuple[Any, ...],
    prefix_tokens: int,
    scale: float | None,
    out_type: ScalarType,
    stream: Any,
    key: Any = None,
) -> None:
    """Queue one merge.

    Parameters
    ----------
    arrays : tuple
        `rules.merge.MERGE_ARRAYS`, as `cpu.merge_states` takes them.
    specs : tuple
        ``arrays.specs`` of them.
    prefix_tokens : int
        Tokens from here on have no prefix.
    scale : float or None
        If no array holds it.
    out_type : ScalarType
    stream : int, stream or None
    key : optional
        Under which `merge_known` finds such merges from now on.

    Raises
    ------
    ValueError
        An output shares memory with an input without being that input.
    CaptureError, CompileError
        As `compile.load_kernel`.
    """
    device = device_for(arrays[0])
    shape = _shape(native_arch(device.info.capability), specs, out_type)
    _queue(shape, device, arrays, prefix_tokens, scale, stream)
    if key is not None:
        _known.keep(key, device, shape)


def _queue(
    shape: _Shape,
    device: Device,
    arrays: tuple[Any, ...],
    prefix_tokens: int,
    scale: float | None,
    stream: Any,
) -> None:
    pointer = device.pointer
    starts = [0 if array is None else pointer(array) for array in arrays]
    for written, read in _IN_PLACE:
        if starts[written]:
            check_in_place(
                (_NAMES[written], _NAMES[read]),
                starts[written],
                shape.footprints[written],
                starts[read],
                shape.footprints[read],
            )
    shape.rows.queue(
        device,
        arrays,
        starts[_PREFIX] | starts[_SUFFIX],
        starts[_OUT],
        (*starts, prefix_tokens, scale or 1.0),
        stream,
    )


@lru_cache(maxsize=1024)
def _shape(arch: str, specs: tuple[Any, ...], out_type: ScalarType) -> _Shape:
    output, prefix, prefix_lse, suffix, suffix_lse = specs[:5]
    output_lse, sink = specs[5:7]
    in_type = scalar_type(prefix[1])
    sink_type = None if sink is None else scalar_type(sink[1])
    assert in_type is not None
    tokens, heads, head_dim = output[0]
    elements = 16 // in_type.itemsize
    alignment = min(16, elements * out_type.itemsize)
    reading = prefix[2][0] | prefix[2][1] | suffix[2][0] | suffix[2][1]
    plans, tails = [], []
    for vectorised in (False, True):
        plans.append(make_merge_plan(arch, in_type, out_type, tokens, heads, head_dim, vectorised))
        tails.append(
            MERGE_PARAMS.pack_tail(
                *output[2][:2],
                *prefix[2][:2],
                *prefix_lse[2],
                *suffix[2][:2],
                *suffix_lse[2],
                *((0, 0) if output_lse is None else output_lse[2]),
                tokens,
                heads,
                head_dim,
                0 if sink_type is None else sink_type.code,
                vectorised,
                0,
            )
        )
    rows = RowShape(
        params=MERGE_PARAMS,
        plans=(plans[0], plans[1]),
        tails=(tails[0], tails[1]),
        strides_allow_wide=head_dim % elements == 0
        and reading % 16 == 0
        and (output[2][0] | output[2][1]) % alignment == 0,
        out_alignment=alignment,
    )
    return _Shape(tokens, rows, tuple(footprint(s or output) for s in specs[:6]))
