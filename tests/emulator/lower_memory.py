"""ld, st, atom, red, ldmatrix, stmatrix, prefetch."""

from __future__ import annotations

import re
from typing import Any

from .names import Scope
from .program import Lowering
from .ptx import PtxError

__all__ = ["SPECIAL"]

SPACES = {"global": 1, "shared": 2, "local": 3, "const": 4, "param": 5}
SPACES |= {"shared::cta": 2, "shared::cluster": 6, "param::entry": 5, "param::func": 3}
ORDERINGS = {"weak": 0, "relaxed": 1, "volatile": 1, "acquire": 2, "release": 3, "acq_rel": 4}
SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
CACHE = re.compile(
    r"(ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+|level::\w+|evict_\w+|no_allocate|cache_hint)$"
)
ATOMIC_OPS = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]
ATOMIC_TYPES = ["u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "b16"]


def pieces(text: str) -> list[str]:
    text = text.strip()
    return [x.strip() for x in text[1:-1].split(",")] if text.startswith("{") else [text]


def describe(low: Lowering, parts: list[str]) -> dict[str, Any]:
    """Space, ordering, scope, vector and type of a memory mnemonic; anything else is unknown."""
    out: dict[str, Any] = {"space": 0, "order": 0, "scope": 2, "vec": 1, "nc": 0, "strong": 0}
    out["rest"] = []
    for part in parts[1:]:
        if part in SPACES:
            out["space"], out["name"] = SPACES[part], part
        elif part in ORDERINGS:
            out["order"], out["strong"] = ORDERINGS[part], int(part != "weak")
            if part == "volatile":
                out["scope"] = 3
        elif part in SCOPES:
            out["scope"] = SCOPES[part]
        elif part in VECTORS:
            out["vec"] = VECTORS[part]
        elif part == "nc":
            out["nc"] = 1
        elif not CACHE.match(part):
            out["rest"].append(part)
    return out


def access(low: Lowering, parts: list[str], args: list[str], scope: Scope, load: bool) -> None:
    d = describe(low, parts)
    if len(d["rest"]) != 1 or not (m := re.match(r"([busf])(8|16|32|64)$", d["rest"][0])):
        raise PtxError(f"unknown access: {low.text}")
    kind, nbytes = m[1], int(m[2]) // 8
    regs = pieces(args[0] if load else args[1])
    where = args[1] if load else args[0]
    if len(regs) != d["vec"]:
        raise PtxError(f"vector of {len(regs)} in: {low.text}")
    widths = {2 if (r := scope.register(x)) is not None and r.width == 2 else 1 for x in regs}
    wide = 2 in widths or (widths == {1} and nbytes == 8)
    ext = 0
    if load and kind == "s" and nbytes < 8:
        ext = 2 if wide else 1 if nbytes < 4 else 0
    if d["space"] == SPACES["param"] and not is_kernel_parameter(low, where, scope):
        d["space"] = SPACES["local"]
    make = low.define if load else low.use
    out: list[Any] = [d["space"], nbytes, d["vec"], ext, int(wide), d["order"], d["scope"]]
    out += [d["nc"] | 2 * d["strong"], *low.pointer(where, scope)]
    out += [make(x, 2 if wide else 1, scope) for x in regs]
    low.emit(("ld" if load else "st") + (".strong" if d["strong"] else ""), out)


def is_kernel_parameter(low: Lowering, where: str, scope: Scope) -> bool:
    name = re.split(r"[+\s]", where.strip("[] "))[0]
    found = scope.find("symbols", name)
    return found is None or found[0] == "param"


def ld(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    access(low, parts, args[:2], scope, True)


def ldu(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    access(low, parts, args[:2], scope, True)


def st(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    if parts[1] == "async":
        store_async(low, parts, args, scope)
        return
    access(low, parts, args[:2], scope, False)


def store_async(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """st.async and red.async: values into the cluster's shared memory, counted by an mbarrier."""
    plain = {"async", "weak", "relaxed", "cluster", "shared::cluster"}
    plain |= {"mbarrier::complete_tx::bytes", *VECTORS}
    rest = [p for p in parts[1:] if p not in plain]
    op = ATOMIC_OPS.index(rest.pop(0)) if parts[0] == "red" and rest[0] in ATOMIC_OPS else -1
    kind = {"b32": "u32", "b64": "u64"}.get(rest[0], rest[0])
    values = pieces(args[1])
    if len(rest) != 1 or kind not in ATOMIC_TYPES[:6] or (parts[0] == "red") != (op >= 0):
        raise PtxError(f"unknown instruction: {low.text}")
    nbytes = 8 if kind.endswith("64") else 4
    out: list[Any] = [*low.pointer(args[0], scope), *low.pointer(args[2], scope), nbytes]
    out += [len(values), op, ATOMIC_TYPES.index(kind)]
    low.emit("async.store", out + [low.use(x, nbytes // 4, scope) for x in values])


def atom(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    if parts[1] == "async":
        store_async(low, parts, args, scope)
        return
    d = describe(low, parts)
    rest = [p for p in d["rest"] if p != "noftz"]
    if len(rest) != 2 or rest[0] not in ATOMIC_OPS:
        raise PtxError(f"unknown atomic: {low.text}")
    op, kind = rest
    kind = {"b32": "u32", "b64": "u64"}.get(kind, kind)
    if kind not in ATOMIC_TYPES:
        raise PtxError(f"unknown atomic: {low.text}")
    returns = parts[0] == "atom"
    if returns:
        target, args = pieces(args[0]), args[1:]
    width = 2 if kind.endswith("64") else 1
    out: list[Any] = [d["space"], ATOMIC_OPS.index(op), ATOMIC_TYPES.index(kind)]
    out += [d["order"] or 1, d["scope"], int(returns), d["vec"], *low.pointer(args[0], scope)]
    if returns:
        out += [low.define(x, width, scope) for x in target]
    out += [low.use(x, width, scope) for x in pieces(args[1])]
    if op == "cas":
        out.append(low.use(args[2], width, scope))
    low.emit("atom", out)


def matrix(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    load = parts[0] == "ldmatrix"
    count = next((int(p[1:]) for p in parts if p in ("x1", "x2", "x4")), 0)
    rest = [p for p in parts[1:] if p not in ("x1", "x2", "x4", "trans") and p not in SPACES]
    if not count or rest != ["sync", "aligned", "m8n8", "b16"]:
        raise PtxError(f"unknown instruction: {low.text}")
    regs, where = (args[0], args[1]) if load else (args[1], args[0])
    make = low.define if load else low.use
    space = next((SPACES[p] for p in parts if p in SPACES), 0)
    if space == SPACES["shared::cluster"]:
        raise PtxError(f"matrices are of the own CTA: {low.text}")
    out: list[Any] = [count, int("trans" in parts), space, *low.pointer(where, scope)]
    low.emit(parts[0], out + [make(x, 1, scope) for x in pieces(regs)])


def prefetch(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    low.pointer(args[0], scope)
    low.emit("prefetch", [])


def createpolicy(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    low.emit("mov.b64", [low.define(args[0], 2, scope), (low.const(2, 1), 1)])


SPECIAL = {
    "ld": ld,
    "ldu": ldu,
    "st": st,
    "atom": atom,
    "red": atom,
    "ldmatrix": matrix,
    "stmatrix": matrix,
    "createpolicy": createpolicy,
    "prefetch": prefetch,
    "prefetchu": prefetch,
    "applypriority": prefetch,
    "discard": prefetch,
}
