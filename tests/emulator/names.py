"""Registers, scopes and operands: what the names in a kernel stand for."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from .ptx import PtxError

__all__ = ["DEF", "USE", "Names", "Reg", "Scope"]

USE, DEF = 1, 2
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << 60, 2 << 60, 3 << 60
SPECIALS = {
    **{f"%tid.{c}": i for i, c in enumerate("xyz")},
    **{f"%ntid.{c}": 3 + i for i, c in enumerate("xyz")},
    **{f"%ctaid.{c}": 6 + i for i, c in enumerate("xyz")},
    **{f"%nctaid.{c}": 9 + i for i, c in enumerate("xyz")},
    "%laneid": 12,
    "%warpid": 13,
    "%nwarpid": 14,
    "%smid": 15,
    "%nsmid": 16,
    **{f"%lanemask_{c}": 17 + i for i, c in enumerate(("eq", "lt", "le", "gt", "ge"))},
    "%dynamic_smem_size": 22,
    "%total_smem_size": 23,
    "%gridid": 24,
    "%cluster_ctarank": 25,
    "%cluster_nctarank": 26,
    **{f"%cluster_ctaid.{c}": 27 + i for i, c in enumerate("xyz")},
    **{f"%cluster_nctaid.{c}": 30 + i for i, c in enumerate("xyz")},
    **{f"%clusterid.{c}": 33 + i for i, c in enumerate("xyz")},
    **{f"%nclusterid.{c}": 36 + i for i, c in enumerate("xyz")},
}
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")


@dataclass(eq=False, slots=True)
class Reg:
    """A virtual register: ``width`` 0 predicate, 1 up to 32 bits, 2 64 bits."""

    width: int
    name: str = ""
    fixed: bool = False  # a constant or special register: set once, when the warp starts
    slot: int = -1
    number: int = -1  # among those that get a place, in the order of their first access
    of_wgmma: bool = False  # an accumulator, or A


class Scope:
    """Names between a pair of braces; looks outwards for what it does not hold."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        self.symbols: dict[str, Any] = {}
        self.tables: dict[str, list[str]] = {}

    def chain(self) -> Any:
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.parent

    def find(self, kind: str, name: str) -> Any:
        for scope in self.chain():
            if name in (names := getattr(scope, kind)):
                return names[name]
        return None

    def register(self, name: str) -> Reg | None:
        scope: Scope | None = self
        while scope:
            if (found := scope.regs.get(name)) is not None:
                return found
            if scope.ranges:
                stem = name.rstrip("0123456789")
                width, count = scope.ranges.get(stem, (0, 0))
                if count and stem != name and int(name[len(stem) :]) < count:
                    return scope.regs.setdefault(name, Reg(width, name))
            scope = scope.parent
        return None


class Names:
    """Operands of the statement ``text`` as registers; constants and addresses get one."""

    text: str
    addresses: dict[str, int]

    def __init__(self) -> None:
        self.consts: dict[tuple[int, int], Reg] = {}
        self.specials: dict[int, Reg] = {}
        self.has_addresses = False  # of variables of the module
        self.junk = [Reg(i, "_", True) for i in range(3)]

    def const(self, width: int, value: int) -> Reg:
        value &= 0xFFFFFFFFFFFFFFFF if width == 2 else 0xFFFFFFFF
        return self.consts.setdefault((width, value), Reg(width, str(value), True))

    def special(self, name: str) -> Reg:
        return self.specials.setdefault(SPECIALS[name], Reg(1, name, True))

    def address_of(self, name: str, scope: Scope) -> int | None:
        """The address of a variable, in its own state space (parameters: generic)."""
        m = re.match(r"([\w$%]+)(?:\+(-?\d+))?$", name)
        if not m:
            return None
        found, offset = scope.find("symbols", m[1]), int(m[2] or 0)
        if found is not None:
            return found[1] + offset + (PARAM_WINDOW if found[0] == "param" else 0)
        if m[1] in self.addresses:
            self.has_addresses = True
            return self.addresses[m[1]] + offset
        return None

    def value(self, text: str, width: int, scope: Scope) -> Reg:
        """The register that holds an operand; constants and addresses get one."""
        text = text.strip()
        if (reg := scope.register(text)) is not None:
            if (reg.width == 0) != (width == 0) or (width == 1 and reg.width == 2):
                raise PtxError(f"operand {text} of {self.text}")
            if width == 2 and reg.width == 1:
                raise PtxError(f"operand {text} of {self.text} has 32 bits")
            return reg
        if text in SPECIALS:
            return self.special(text)
        if _INTEGER.match(text):
            value = int(text.rstrip("U"), 0) if not re.match(r"0\d", text) else int(text, 8)
            if width == 0:
                return self.const(0, 0xFFFFFFFF if value else 0)
            return self.const(width, value)
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return self.const(1, int(text[2:], 16))
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return self.const(2, int(text[2:], 16))
        if re.match(r"-?\d*\.\d+([eE][-+]?\d+)?$|-?\d+\.$", text):
            code, bits = ("<d", "<Q") if width == 2 else ("<f", "<I")
            return self.const(width, struct.unpack(bits, struct.pack(code, float(text)))[0])
        if text == "WARP_SZ":
            return self.const(width, 32)
        if (address := self.address_of(text, scope)) is not None:
            return self.const(width, address)
        raise PtxError(f"operand {text} of {self.text}")

    def predicate(self, text: str, scope: Scope) -> tuple[Reg, bool]:
        """A predicate operand and whether it is negated."""
        text = text.strip()
        negated = text.startswith("!")
        return self.value(text.lstrip("!"), 0, scope), negated

    def use(self, text: str, width: int, scope: Scope) -> tuple[Reg, int]:
        return (self.value(text, width, scope), USE)

    def define(self, text: str, width: int, scope: Scope) -> tuple[Reg, int]:
        text = text.strip()
        if text == "_":
            return (self.junk[width], DEF)
        reg = scope.register(text)
        if reg is None or (reg.width == 0) != (width == 0):
            raise PtxError(f"destination {text} of {self.text}")
        if reg.width != width:
            raise PtxError(f"destination {text} of {self.text} has {32 * reg.width} bits")
        return (reg, DEF)

    def pointer(self, text: str, scope: Scope) -> list[Any]:
        """``[base+offset]`` as slot, is 64-bit, offset; the base may be a variable."""
        inner = text.strip().removeprefix("[").removesuffix("]").strip()
        m = re.match(r"(.+?)\s*\+\s*(-?\w+)$", inner)
        name, offset = (m[1], int(m[2], 0)) if m else (inner, 0)
        if (reg := scope.register(name)) is not None:
            return [(reg, USE), int(reg.width == 2), offset]
        address = self.address_of(name, scope)
        if address is None and _INTEGER.match(name):
            address = int(name, 0)
        if address is None:
            raise PtxError(f"address {text} of {self.text}")
        return [(self.const(2, address + offset), USE), 1, 0]
