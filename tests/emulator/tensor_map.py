"""Tensor maps in the machine's own layout, under the rules of ``cuTensorMapEncodeTiled``."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

__all__ = ["encode_tiled"]

MAGIC = 0x7E4507AB
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
FLOATS = {6, 7, 8, 9, 10, 11, 12}
SWIZZLE_SPAN = {1: 32, 2: 64, 3: 128}


def check(rule: bool, what: str) -> None:
    if not rule:
        raise ValueError(f"cuTensorMapEncodeTiled: {what}")


def encode_tiled(
    element_type: int,
    pointer: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> np.ndarray:
    """A 128-byte map; dimensions innermost first, ``strides_bytes`` of all but the first.

    Raises
    ------
    ValueError
        What the driver answers with CUDA_ERROR_INVALID_VALUE.
    NotImplementedError
        A valid map that the emulator does not model: interleaved layouts, packed 4- and 6-bit
        types, atoms of 128-byte swizzles, an inner box narrower than its swizzle.
    """
    rank = len(shape)
    element_strides = list(element_strides or [1] * rank)
    if interleave or swizzle > 3 or element_type > 12:
        raise NotImplementedError(
            f"interleave={interleave}, swizzle={swizzle}, type={element_type}: not modelled"
        )
    size = ELEMENT_BYTES[element_type]
    check(1 <= rank <= 5, f"rank {rank}")
    check(len(strides_bytes) == rank - 1, f"{len(strides_bytes)} strides for rank {rank}")
    check(len(box) == rank and len(element_strides) == rank, "box or element strides of other rank")
    check(pointer % 16 == 0, f"address {pointer:#x} is not a multiple of 16")
    check(all(1 <= d <= 1 << 32 for d in shape), f"shape {tuple(shape)}")
    for s in strides_bytes:
        check(s % 16 == 0 and 0 <= s < 1 << 40, f"stride {s} is not a multiple of 16 below 2**40")
    check(all(1 <= b <= 256 for b in box), f"box {tuple(box)}: each in 1..256")
    check(all(1 <= e <= 8 for e in element_strides), f"element strides {tuple(element_strides)}")
    inner = box[0] * size
    check(inner % 16 == 0, f"inner box of {inner} bytes is not a multiple of 16")
    if swizzle:
        span = SWIZZLE_SPAN[swizzle]
        check(inner <= span, f"inner box of {inner} bytes with a swizzle of {span} bytes")
        if inner < span:  # the rows are padded to the span in shared memory
            raise NotImplementedError(f"inner box of {inner} bytes in a swizzle of {span} bytes")
    check(0 <= l2_promotion <= 3, f"l2 promotion {l2_promotion}")
    check(oob_fill in (0, 1), f"oob fill {oob_fill}")
    check(oob_fill == 0 or element_type in FLOATS, "NaN fill of an integer type")
    pad = [0] * (5 - rank)
    head = [MAGIC, pointer, rank, size, swizzle, oob_fill, *shape, *pad]
    head += [*strides_bytes, *[0] * (5 - rank), *box, *pad]
    packed = struct.pack("<2Q4I5Q4Q5H", *head) + bytes([*element_strides, *[1] * (5 - rank)])
    packed += bytes([element_type])
    raw = np.zeros(128 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + 128]
    out[: len(packed)] = np.frombuffer(packed, np.uint8)
    return out.view(np.dtype([("bytes", np.void, 128)])).reshape(())
