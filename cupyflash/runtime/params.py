"""Kernel parameters: one packed struct by value, laid out as the C++ compiler lays it out."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

__all__ = ["KernelArgs", "ParamsLayout"]

_CODES = {"ptr": "Q", "i64": "q", "u64": "Q", "i32": "i", "u32": "I", "f32": "f"}


class ParamsLayout:
    """The fields of one params struct, in the order of ``core/params.cuh``.

    Fields are named ``(name, kind)`` with kind ``ptr i64 u64 i32 u32 f32``, in an order in which
    each is aligned as it is, so that C++ and Python agree: no padding inside, the size padded to 8.

    Attributes
    ----------
    names : tuple of str
    fields : tuple of (str, str, int)
        Name, kind and offset in bytes.
    nbytes : int
    """

    def __init__(self, *fields: tuple[str, str]) -> None:
        sizes = [struct.calcsize(_CODES[kind]) for _, kind in fields]
        for i, (name, _) in enumerate(fields):
            if sum(sizes[:i]) % sizes[i]:
                raise AssertionError(f"{name} is not aligned to {sizes[i]} bytes")
        self.names = tuple(name for name, _ in fields)
        self.fields = tuple((*field, sum(sizes[:i])) for i, field in enumerate(fields))
        pad = -sum(sizes) % 8
        self._struct = struct.Struct("=" + "".join(_CODES[kind] for _, kind in fields) + "x" * pad)
        self._parts: dict[int, struct.Struct] = {}
        self.nbytes = self._struct.size

    def pack(self, *values: Any) -> bytes:
        """The struct that a launch passes by value; one value a field, in order."""
        return self._struct.pack(*values)

    def pack_tail(self, *values: Any) -> bytes:
        """The last fields, for `pack_head`: what calls of one shape have in common."""
        return self._part(-len(values)).pack(*values)

    def pack_head(self, tail: bytes, *values: Any) -> bytes:
        """What `pack` makes, of the first fields and the packed rest."""
        part = self._parts.get(len(values)) or self._part(len(values))
        return part.pack(*values) + tail

    def _part(self, count: int) -> struct.Struct:
        """The first ``count`` fields, or the last ``-count`` and the padding."""
        found = self._parts.get(count)
        if found is None:
            text = self._struct.format[1:]
            cut = text[:count] if count > 0 else text[len(self.names) + count :]
            found = self._parts[count] = struct.Struct("=" + cut)
        return found

    def unpack(self, packed: bytes) -> dict[str, Any]:
        """The fields of a packed struct by name (for tests and error reports)."""
        return dict(zip(self.names, self._struct.unpack(packed), strict=True))


class KernelArgs(NamedTuple):
    """What a launch passes, and what it must keep alive.

    Attributes
    ----------
    values : tuple of bytes
        Structs passed by value: the params, then any 128-byte tensor maps.
    arrays : tuple
        Every device array that a pointer in ``values`` refers to, and possibly things that are no
        arrays. They stay alive until the launch is queued, and they are the only memory the kernel
        may touch.
    """

    values: tuple[bytes, ...]
    arrays: tuple[Any, ...] = ()
