"""Lowering: a parsed kernel to the machine's instructions, registers, constants and addresses."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any

from .library import opcodes
from .ptx import Function, Module, PtxError, Symbol, variable

__all__ = ["Lowering", "Reg", "Scope"]

USE, DEF = 1, 2
TOUCHES = 1 << 30  # the instruction accesses registers that some wgmma uses
SHARED_BASE = 1024
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
    "%cluster_ctarank": 24,
    "%cluster_nctarank": 25,
    "%gridid": 26,
    "%is_explicit_cluster": 24,
    **{f"%cluster_ctaid.{c}": 24 for c in "xyz"},
    **{f"%cluster_nctaid.{c}": 25 for c in "xyz"},
    **{f"%clusterid.{c}": 6 + i for i, c in enumerate("xyz")},
    **{f"%nclusterid.{c}": 9 + i for i, c in enumerate("xyz")},
}
MODIFIERS = {
    "ftz": 1,
    "sat": 2,
    "rz": 4,
    "rm": 8,
    "rp": 16,
    "NaN": 32,
    "relu": 64,
    "approx": 128,
    "wrap": 1024,
    "satfinite": 2048,
    "shiftamt": 4096,
    "xorsign": 8192,
    "abs": 0,
    "rn": 0,
    "rna": 0,
    "full": 128,
    "clamp": 0,
    "noftz": 0,
}
_REGISTER_TYPE = {"pred": 0, "b64": 2, "u64": 2, "s64": 2, "f64": 2}
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")


@dataclass(eq=False)
class Reg:
    """A virtual register: ``width`` 0 predicate, 1 up to 32 bits, 2 64 bits."""

    width: int
    name: str = ""
    fixed: bool = False  # a constant or special register: set once, when the warp starts
    slot: int = -1


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
        m = re.match(r"(.*?)(\d+)$", name)
        for scope in self.chain():
            if name in scope.regs:
                return scope.regs[name]
            if m and m[1] in scope.ranges and int(m[2]) < scope.ranges[m[1]][1]:
                return scope.regs.setdefault(name, Reg(scope.ranges[m[1]][0], name))
        return None


@dataclass
class Insn:
    op: int
    args: list[Any]  # int, or (Reg, USE | DEF)
    pred: Reg | None
    negate: bool
    flags: int
    line: int
    text: str
    targets: list[Any] = field(default_factory=list)
    is_wgmma: bool = False


class Lowering:
    """Turns one entry function into instructions; calls are inlined."""

    def __init__(self, module: Module, entry: str, addresses: dict[str, int]) -> None:
        self.module, self.addresses = module, addresses
        self.table = opcodes()
        self.code: list[Insn] = []
        self.consts: dict[tuple[int, int], Reg] = {}
        self.specials: dict[int, Reg] = {}
        self.lines: list[tuple[int, int]] = [(0, 0)]
        self.junk = [Reg(i, "_") for i in range(3)]
        self.local_bytes = 16
        self.static_end = SHARED_BASE
        self.dynamic_align = 16
        self.param_offset: dict[str, int] = {}
        self.pred: Reg | None = None
        self.negate = False
        self.text = ""
        self.calls: list[str] = []
        self.returns: list[Scope] = []
        self.last_label = ""
        self.wgmma_regs: set[Reg] = set()
        if entry not in module.functions:
            raise PtxError(f"no kernel {entry}; the module has {', '.join(module.functions)}")
        function = module.functions[entry]
        if re.search(r"\.(reqnctapercluster|explicitcluster)", function.attributes):
            sizes = re.search(r"\.reqnctapercluster\s+([\d, ]+)", function.attributes)
            if not sizes or any(int(x) != 1 for x in re.findall(r"\d+", sizes[1])):
                raise PtxError(f"clusters larger than 1 are not modelled: {function.attributes}")
        root = Scope()
        for s in module.symbols.values():
            if s.space == "shared" and not s.dynamic:
                root.symbols[s.name] = self._static(s)
        offset = 0
        for s in function.params:
            offset = -(-offset // s.align) * s.align
            self.param_offset[s.name] = offset
            root.symbols[s.name] = ("param", offset)
            offset += s.nbytes
        self.param_bytes = offset
        self.param_sizes = [s.nbytes for s in function.params]
        for item in function.items:
            if item[0] == "do" and item[1].startswith(".shared"):
                s = variable(item[1])
                root.symbols[s.name] = self._static(s)
        for s in module.symbols.values():
            if s.dynamic:
                self.dynamic_align = max(self.dynamic_align, s.align)
        align = self.dynamic_align
        base = -(-self.static_end // align) * align
        # Aligned as declared and no better, so that a kernel cannot rely on more.
        self.dynamic_base = base + align if align < 1024 and base % (2 * align) == 0 else base
        for s in module.symbols.values():
            if s.dynamic:
                root.symbols[s.name] = ("shared", self.dynamic_base)
        self._walk(function, Scope(root))
        self.emit("ret", [])
        self._resolve_labels()
        for insn in self.code:
            if not insn.is_wgmma and any(
                isinstance(a, tuple) and a[0] in self.wgmma_regs for a in insn.args
            ):
                insn.flags |= TOUCHES

    # ---- structure
    def _static(self, s: Symbol) -> tuple[str, int]:
        start = -(-self.static_end // s.align) * s.align
        self.static_end = start + s.nbytes
        return ("shared", start)

    def _local(self, s: Symbol) -> tuple[str, int]:
        start = -(-self.local_bytes // s.align) * s.align
        self.local_bytes = start + s.nbytes
        return ("local", start)

    def _walk(self, function: Function, scope: Scope) -> None:
        from .lower import lower_statement

        outer = scope
        for item in function.items:
            if item[0] == "do":
                text = item[1]
                if text.startswith("."):
                    self._directive(text, scope)
                else:
                    lower_statement(self, text, scope)
            elif item[0] == "loc":
                numbers = item[1].split(",")[0].split()
                self.lines.append((int(numbers[0]), int(numbers[1])))
            elif item[0] == "label":
                scope.labels[item[1]] = len(self.code)
                self.last_label = item[1]
            elif item[0] == "open":
                scope = Scope(scope)
            else:
                scope = scope.parent or outer

    def _directive(self, text: str, scope: Scope) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            width = _REGISTER_TYPE.get(kind[1:], 1)
            if kind == ".b128":
                raise PtxError("128-bit registers are not modelled")
            for name in names.replace(" ", "").split(","):
                if m := re.match(r"(.*)<(\d+)>$", name):
                    scope.ranges[m[1]] = (width, int(m[2]))
                else:
                    scope.regs[name] = Reg(width, name)
        elif text.startswith((".local", ".param")):
            s = variable(text)
            scope.symbols[s.name] = self._local(s)
        elif text.startswith(".branchtargets"):
            scope.tables[self.last_label] = text.split(None, 1)[1].replace(" ", "").split(",")
        elif not text.startswith((".shared", ".pragma", ".callprototype")):
            raise PtxError(f"directive: {text[:100]}")

    def inline(self, function: Function, scope: Scope, bind: dict[str, Any]) -> None:
        """Places a function's body here; its parameters are the caller's variables."""
        if function.name in self.calls:
            raise PtxError(f"recursion in {function.name} is not modelled")
        self.calls.append(function.name)
        root = scope
        while root.parent:
            root = root.parent
        inner = Scope(root)
        inner.symbols.update(bind)
        end = Scope(inner)
        self.returns.append(inner)
        self._walk(function, end)
        self.returns.pop()
        inner.labels["%return"] = len(self.code)
        self.calls.pop()

    def _resolve_labels(self) -> None:
        for insn in self.code:
            for i, (label, scope) in insn.targets:
                found = scope.find("labels", label)
                if found is None:
                    raise PtxError(f"label {label} in: {insn.text}")
                insn.args[i] = found

    # ---- operands
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
        if width == 2 and reg.width == 1:
            raise PtxError(f"destination {text} of {self.text} has 32 bits")
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

    # ---- instructions
    def emit(self, name: str, args: list[Any], flags: int = 0, variant: int = 0) -> Insn:
        found = self.table.get(name)
        if not found:
            raise PtxError(f"unknown instruction {name} in: {self.text}")
        line = len(self.lines) - 1
        insn = Insn(found[variant][0], args, self.pred, self.negate, flags, line, self.text)
        self.code.append(insn)
        return insn
