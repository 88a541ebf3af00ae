"""Tensor maps of keys and values in boxes of 128 bytes a key, and what arrays of a call allow."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import AttentionArrays
from .device import Device
from .layout import Layout
from .tensor_map import NO_PROMOTION, SWIZZLE_128B, UINT8, UINT16, ZERO_FILL, rows_refusal

__all__ = ["KeyMap", "KeyMaps", "bits_of_out", "key_map", "prefetched_bytes", "tma_refusal"]

_MOST_PLACES = 1024
_LARGEST_PREFETCH = 1 << 20  # bytes of a block table
_WIDE = 16


class KeyMap(NamedTuple):
    """Of a tensor map all but the address: element type, shape, strides in bytes, box."""

    kind: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def key_map(spec: Any, panels: int, box_keys: int, whole: bool, heads_a_box: int = 1) -> KeyMap:
    """Of [blocks, slots, heads, dim] or [tokens, heads, dim]: (element, slot, panel, head, block).

    A box has 128 bytes of each of its keys, or all of them as panels one after the other; what lies
    past the head size is filled with zeros.

    Parameters
    ----------
    spec : tuple
        Shape, dtype and strides in bytes.
    panels, box_keys : int
        Of a box.
    whole : bool
        The head size is whole panels, and a box has ``panels`` of them.
    heads_a_box : int
        Heads whose keys a box has, one head's after another's.
    """
    shape, dtype, strides = spec
    if len(shape) == 3:
        shape, strides = (1, *shape), (_WIDE, *strides)
    blocks, slots, heads, dim = shape
    width = 128 // dtype.itemsize
    across = dim // width if whole else 1
    # Any stride that the driver takes, where a dimension has one element.
    steps = [_WIDE if n == 1 else s for n, s in zip(shape[:3], strides[:3], strict=True)]
    return KeyMap(
        UINT8 if dtype.itemsize == 1 else UINT16,
        (width if whole else dim, slots, across, heads, blocks),
        (steps[1], 128 if whole else _WIDE, steps[2], steps[0]),
        (width, box_keys, panels if whole else 1, heads_a_box, 1),
    )


def tma_refusal(
    layout: Layout, starts: tuple[int, ...], names: tuple[str, ...] = ("q", "k", "v", "out")
) -> str:
    """Why TMA cannot read or write arrays of a call; empty where it can.

    Parameters
    ----------
    layout : Layout
    starts : tuple of int
        Addresses of the arrays (0 for a new one), or what they leave over multiples of 16.
    names : tuple of str
        Which arrays; the first ones if there are fewer ``starts``.
    """
    arrays = AttentionArrays(*layout.specs)
    for name, start in zip(names, starts, strict=False):
        spec = getattr(arrays, name)
        refused = "" if spec is None else rows_refusal(name, spec, start)
        if refused:
            return refused
    return ""


class KeyMaps:
    """The maps of calls of one layout: k's and v's in turn, encoded once an address."""

    __slots__ = ("_encoded", "maps")

    def __init__(self, maps: tuple[KeyMap, ...]) -> None:
        self.maps = maps
        self._encoded: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def at(self, device: Device, k: Any, v: Any) -> tuple[bytes, ...]:
        starts = device.pointer(k), device.pointer(v)
        return self._encoded.get(starts) or self._encode(device, (k, v), starts)

    def _encode(
        self, device: Device, arrays: tuple[Any, Any], starts: tuple[int, int]
    ) -> tuple[bytes, ...]:
        found = tuple(
            device.encode_tensor_map(
                arrays[i % 2], kind, starts[i % 2], shape, strides, box,
                SWIZZLE_128B, NO_PROMOTION, ZERO_FILL,
            )
            for i, (kind, shape, strides, box) in enumerate(self.maps)
        )  # fmt: skip
        if len(self._encoded) >= _MOST_PLACES:
            self._encoded.clear()
        return self._encoded.setdefault(starts, found)


def bits_of_out(layout: Layout) -> int:
    """The bits that rows of ``out`` have in their addresses besides those of the first."""
    out = AttentionArrays(*layout.specs).out
    if out is None:
        return layout.problem.head_dim_v * layout.problem.out_type.itemsize
    return int(out[2][0] | out[2][1])


def prefetched_bytes(layout: Layout) -> int:
    """Of the block table; 0 where there is nothing in it, or too much."""
    table = AttentionArrays(*layout.specs).block_table
    if table is None or 0 in table[0]:
        return 0
    (rows, columns), _, (stride, _) = table
    nbytes = (rows - 1) * stride + columns * 4
    return nbytes if nbytes <= _LARGEST_PREFETCH else 0
