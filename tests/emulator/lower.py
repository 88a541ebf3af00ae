"""One PTX statement to instructions: plain opcodes, moves, compares, control, collectives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from .library import opcodes
from .lower_memory import pieces
from .names import DEF, USE, Reg, Scope
from .program import MODIFIERS, Lowering
from .ptx import PtxError

__all__ = ["lower_statement", "operands"]

_STATEMENT = re.compile(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
COMPARES = ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"]
COMPARES += ["equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
BOOLEANS = {"and": 1, "or": 2, "xor": 3}
CVT_TYPES = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"]
CVT_ROUNDS = ["", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"]
CLOCKS = ("%clock", "%globaltimer")
# Width and role of an operand that is a register.
PLAIN = {"R": (1, DEF), "D": (2, DEF), "P": (0, DEF), "r": (1, USE), "d": (2, USE), "p": (0, USE)}
WIDTH64 = {"u64", "s64", "b64", "f64"}
Special = Callable[[Lowering, list[str], list[str], Scope], None]


def operands(text: str) -> list[str]:
    """Comma-separated operands; braces, brackets and parentheses stay whole."""
    out, depth, start = [], 0, 0
    if not any(c in text for c in "{[("):
        return [x.strip() for x in text.split(",")] if text.strip() else []
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*out, last] if last else out


def lower_statement(low: Lowering, text: str, scope: Scope) -> None:
    m = _STATEMENT.match(text)
    if not m:
        raise PtxError(f"statement: {text}")
    low.text = text if len(text) < 160 else text[:157] + "..."
    low.pred, low.negate = None, False
    if m[2]:
        low.pred, low.negate = low.value(m[2], 0, scope), bool(m[1])
    mnemonic, parts, args = m[3], m[3].split("."), operands(m[4])
    if mnemonic != "ret" and plain(low, mnemonic, parts, args, scope):
        return
    special = SPECIAL.get(parts[0])
    if special is None:
        raise PtxError(f"unknown instruction {mnemonic} in: {low.text}")
    special(low, parts, args, scope)


def plain(low: Lowering, mnemonic: str, parts: list[str], args: list[str], scope: Scope) -> bool:
    """An opcode of the table, after its modifiers are taken out."""
    name, flags = without_modifiers(mnemonic)
    found = low.table.get(name)
    if found is None:
        return False
    flat = args
    if any(a[0] == "{" for a in args):
        if parts[0] == "mov":
            return False
        flat = [x for a in args for x in pieces(a)]
    if parts[0] == "mov" and args[1].startswith(CLOCKS):
        return False
    for variant, (_, letters, allowed) in enumerate(found):
        if letters == "*" or "m" in letters or len(letters) != len(flat) or flags & ~allowed:
            continue
        if parts[0] == "cvt" and wider(letters, flat, scope):
            continue
        low.emit(name, signature(low, letters, flat, scope), flags, variant)
        return True
    return False


@functools.cache
def without_modifiers(mnemonic: str) -> tuple[str, int]:
    """The name in the table, and the flags that stand for the rest of a mnemonic."""
    if mnemonic in opcodes():
        return mnemonic, 0
    parts, flags = mnemonic.split("."), 0
    kept = parts[:1]
    for part in parts[1:]:
        if part in MODIFIERS and not (part == "abs" and "xorsign" not in parts):
            flags |= MODIFIERS[part]
        else:
            kept.append(part)
    return ".".join(kept), flags


def wider(letters: str, args: list[str], scope: Scope) -> bool:
    """Whether a 64-bit register stands for a narrower type, as PTX allows in cvt (not in moves)."""
    regs = [scope.register(a) for a in args]
    return any(
        letter in "Rr" and reg is not None and reg.width == 2
        for letter, reg in zip(letters, regs, strict=True)
    )


def signature(low: Lowering, letters: str, args: list[str], scope: Scope) -> list[Any]:
    out: list[Any] = []
    for letter, text in zip(letters, args, strict=True):
        if letter in PLAIN and (reg := scope.register(text)) and reg.width == PLAIN[letter][0]:
            out.append((reg, PLAIN[letter][1]))
        elif letter == "i":
            out.append(int(text, 0))
        elif letter == "p":
            reg, negated = low.predicate(text, scope)
            if negated:
                raise PtxError(f"negated predicate in {low.text}")
            out.append((reg, 1))
        elif letter in "RDP":
            out.append(low.define(text, "PRD".index(letter), scope))
        else:
            out.append(low.use(text, {"d": 2}.get(letter, 1), scope))
    return out


# ---- moves, conversions, comparisons
def mov(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    kind = parts[-1]
    wide = kind in WIDTH64
    if args[1] in ("%clock64", "%globaltimer"):
        low.emit("clock64", [low.define(args[0], 2, scope)])
    elif args[1] in ("%clock", "%clock_hi", "%globaltimer_lo", "%globaltimer_hi"):
        low.emit("clock", [low.define(args[0], 1, scope)])
    elif args[1].startswith("{"):
        part = pieces(args[1])
        narrow = 2 if wide and len(part) == 1 else 1
        out = [low.define(args[0], 2 if wide else 1, scope)]
        low.emit(f"mov.{kind}{{{len(part)}}}", out + [low.use(x, narrow, scope) for x in part])
    elif args[0].startswith("{"):
        part = pieces(args[0])
        out = [low.define(x, 1, scope) for x in part]
        low.emit(f"mov.{{{len(part)}}}{kind}", [*out, low.use(args[1], 2 if wide else 1, scope)])
    else:
        raise PtxError(f"unknown move: {low.text}")


def cvt(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    to, source = parts[-2], parts[-1]
    known = {*CVT_ROUNDS[1:], "ftz", "sat", "relu", "satfinite"}
    if to not in CVT_TYPES or source not in CVT_TYPES or not set(parts[1:-2]) <= known:
        raise PtxError(f"unknown conversion: {low.text}")
    rounding = next((CVT_ROUNDS.index(p) for p in parts[1:-2] if p in CVT_ROUNDS), 0)
    flags = sum(MODIFIERS[p] for p in parts[1:-2] if p not in CVT_ROUNDS)
    dest = scope.register(args[0])
    wide = int(dest is not None and dest.width == 2)
    narrow = int(dest is not None and dest.name.startswith("%rs"))
    src = scope.register(args[1])
    src_width = 2 if source in WIDTH64 or (src is not None and src.width == 2) else 1
    out = low.define(args[0], 2 if wide else 1, scope)
    types = [CVT_TYPES.index(to), CVT_TYPES.index(source)]
    rest = [*types, rounding, wide, int(src_width == 2), narrow]
    low.emit("cvt", [out, low.use(args[1], src_width, scope), *rest], flags)


def setp(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    kind = parts[-1]
    boolean = next((BOOLEANS[p] for p in parts[2:-1] if p in BOOLEANS), 0)
    rest = [p for p in parts[2:-1] if p not in BOOLEANS and p != "ftz"]
    if rest or parts[1] not in COMPARES:
        raise PtxError(f"unknown comparison: {low.text}")
    targets = args[0].split("|")
    p = low.define(targets[0], 0, scope)
    q = low.define(targets[1], 0, scope) if len(targets) > 1 else (low.junk[0], 2)
    width = 2 if kind in WIDTH64 else 1
    a, b = low.use(args[1], width, scope), low.use(args[2], width, scope)
    if boolean:
        c, negated = low.predicate(args[3], scope)
        if negated:
            c = invert(low, c)
    else:
        c = low.const(0, 0)
    how = [COMPARES.index(parts[1]), boolean]
    low.emit(f"setp.{kind}", [p, q, a, b, (c, 1), *how], MODIFIERS["ftz"] if "ftz" in parts else 0)


def invert(low: Lowering, reg: Any) -> Any:
    out = Reg(0, "!")
    low.emit("not.pred", [(out, DEF), (reg, 1)])
    return out


def set_(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    to, kind = parts[-2], parts[-1]
    if any(p in BOOLEANS for p in parts):
        raise PtxError(f"unknown comparison: {low.text}")
    width = 2 if kind in WIDTH64 else 1
    out = [low.define(args[0], 1, scope), *(low.use(x, width, scope) for x in args[1:3])]
    out.append(COMPARES.index(parts[1]))
    low.emit(f"set.{to}.{kind}", out, MODIFIERS["ftz"] if "ftz" in parts else 0)


def selp_like(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """Predicate operands that are negated: and/or/xor/selp with ``!p``."""
    name = ".".join(parts)
    if name not in low.table:
        raise PtxError(f"unknown instruction: {low.text}")
    letters = low.table[name][0][1]
    out: list[Any] = []
    for letter, text in zip(letters, args, strict=True):
        if letter == "p":
            reg, negated = low.predicate(text, scope)
            out.append((invert(low, reg) if negated else reg, 1))
        else:
            out += signature(low, letter, [text], scope)
    low.emit(name, out)


SPECIAL: dict[str, Special] = {
    "mov": mov,
    "cvt": cvt,
    "setp": setp,
    "set": set_,
    **dict.fromkeys(("and", "or", "xor", "not", "selp"), selp_like),
}

from . import lower_async, lower_control, lower_memory  # noqa: E402  (they register their instructions)

SPECIAL.update(lower_control.SPECIAL)
SPECIAL.update(lower_memory.SPECIAL)
SPECIAL.update(lower_async.SPECIAL)
