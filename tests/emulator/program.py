"""Lowering: a parsed kernel to the machine's instructions, registers, constants and addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .library import opcodes
from .names import Names, Reg, Scope
from .ptx import Function, Module, PtxError, Symbol, variable

__all__ = ["MODIFIERS", "SHARED_BASE", "Insn", "Lowering"]

TOUCHES = 1 << 30  # the instruction accesses registers that some wgmma uses
SHARED_BASE = 1024
_REGISTER_TYPE = {"pred": 0, "b64": 2, "u64": 2, "s64": 2, "f64": 2}
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


@dataclass(slots=True)
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


class Lowering(Names):
    """Turns one entry function into instructions; calls are inlined."""

    def __init__(self, module: Module, entry: str, addresses: dict[str, int]) -> None:
        super().__init__()
        self.module, self.addresses = module, addresses
        self.table = opcodes()
        self.code: list[Insn] = []
        self.lines: list[tuple[int, int]] = [(0, 0)]
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
        self.wgmma_regs: dict[Reg, None] = {}  # in their order
        if entry not in module.functions:
            raise PtxError(f"no kernel {entry}; the module has {', '.join(module.functions)}")
        function = module.functions[entry]
        found = re.search(r"\.reqnctapercluster\s+([\d, ]+)", function.attributes)
        sizes = [int(x) for x in re.findall(r"\d+", found[1])] if found else []
        self.cluster = tuple([*sizes, 1, 1, 1][:3]) if found else None
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
        for reg in self.wgmma_regs:
            reg.of_wgmma = True
        for insn in self.code if self.wgmma_regs else ():
            if not insn.is_wgmma and any(type(a) is tuple and a[0].of_wgmma for a in insn.args):
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

    # ---- instructions
    def emit(self, name: str, args: list[Any], flags: int = 0, variant: int = 0) -> Insn:
        found = self.table.get(name)
        if not found:
            raise PtxError(f"unknown instruction {name} in: {self.text}")
        line = len(self.lines) - 1
        insn = Insn(found[variant][0], args, self.pred, self.negate, flags, line, self.text)
        self.code.append(insn)
        return insn
