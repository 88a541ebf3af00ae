"""Branches, calls, barriers, exchanges inside the warp."""

from __future__ import annotations

from typing import Any

from .lower_memory import pieces
from .names import Scope
from .program import Lowering
from .ptx import PtxError

__all__ = ["SPECIAL"]


def bra(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    insn = low.emit("bra", [0])
    insn.targets.append((0, (args[0], scope)))


def brx(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    labels = scope.find("tables", args[1])
    if labels is None:
        raise PtxError(f"branch table of: {low.text}")
    insn = low.emit("brx.idx", [low.use(args[0], 1, scope), *[0] * len(labels)])
    insn.targets += [(1 + i, (name, scope)) for i, name in enumerate(labels)]


def ret(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    if low.returns and parts[0] == "ret":
        insn = low.emit("bra", [0])
        insn.targets.append((0, ("%return", low.returns[-1])))
    else:
        low.emit("ret", [])


def call(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    lists = [pieces("{" + a[1:-1] + "}") if a.startswith("(") else a for a in args]
    results = lists.pop(0) if isinstance(lists[0], list) else []
    name = lists.pop(0)
    actual = lists.pop(0) if lists and isinstance(lists[0], list) else []
    function = low.module.functions.get(name)
    if function is None:
        raise PtxError(f"call of {name}, which the module does not define")
    bind = {}
    formals = [*function.returns, *function.params]
    for formal, arg in zip(formals, [x for x in [*results, *actual] if x], strict=True):
        bind[formal.name] = scope.find("symbols", arg)
        if bind[formal.name] is None:
            raise PtxError(f"argument {arg} of: {low.text}")
    skip = None
    if low.pred is not None:
        low.negate = not low.negate
        skip = low.emit("bra", [0])
        low.pred = None
    low.inline(function, scope, bind)
    if skip:
        after = Scope()
        after.labels["after"] = len(low.code)
        skip.targets.append((0, ("after", after)))


def barrier(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """bar and barrier: sync, arrive, red; ``.cta`` says nothing new."""
    kept = [p for p in parts if p not in ("cta", "aligned")]
    aligned = parts[0] == "bar" or "aligned" in parts
    if kept[:2] == ["barrier", "cluster"]:
        cluster_barrier(low, parts, kept)
        return
    if kept[:3] == ["bar", "warp", "sync"]:
        low.emit("bar.warp.sync", [low.use(args[0], 1, scope)])
        return
    base = "bar" if aligned else "barrier"
    if kept[1] == "red":
        result, rest, vote = args[0], args[1:-1], args[-1]
        count: Any = low.use(rest[1], 1, scope) if len(rest) > 1 else -1
        reg, negated = low.predicate(vote, scope)
        op = {"popc": 0, "and": 1, "or": 2}[kept[2]]
        out = low.define(result, 1 if op == 0 else 0, scope)
        name = "bar.red.popc" if op == 0 else "bar.red"
        low.emit(name, [low.use(rest[0], 1, scope), count, op, (reg, 1), int(negated), out])
        return
    if kept[1] not in ("sync", "arrive") or len(kept) > 2:
        raise PtxError(f"unknown barrier: {low.text}")
    count = low.use(args[1], 1, scope) if len(args) > 1 else -1
    low.emit(f"{base}.{kept[1]}", [low.use(args[0], 1, scope), count])


def cluster_barrier(low: Lowering, parts: list[str], kept: list[str]) -> None:
    what, modifiers = kept[2], set(kept[3:])
    allowed = {"release", "relaxed"} if what == "arrive" else {"acquire"}
    if what not in ("arrive", "wait") or not modifiers <= allowed:
        raise PtxError(f"unknown barrier: {low.text}")
    name = f"barrier.cluster.{what}" + (".aligned" if "aligned" in parts else "")
    low.emit(name, [int("relaxed" in modifiers)] if what == "arrive" else [])


def mapa(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """The place of an address in the shared memory of another CTA of the cluster."""
    width = 2 if parts[-1] == "u64" else 1
    generic = parts[1:-1] == []
    if parts[1:-1] not in ([], ["shared::cluster"]) or (generic and width == 1):
        raise PtxError(f"unknown instruction: {low.text}")
    out = [low.define(args[0], width, scope), low.use(args[1], width, scope)]
    out.append(low.use(args[2], 1, scope))
    low.emit("mapa64" if width == 2 else "mapa32", [*out, int(generic)] if width == 2 else out)


def getctarank(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    width = {"u32": 1, "u64": 2}.get(parts[-1])  # of the address; the rank has 32 bits
    if width is None or parts[1:-1] not in ([], ["shared::cluster"]):
        raise PtxError(f"unknown instruction: {low.text}")
    out = [low.define(args[0], 1, scope), low.use(args[1], width, scope)]
    low.emit("getctarank64" if width == 2 else "getctarank32", out)


def shfl(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    mode = {"up": 0, "down": 1, "bfly": 2, "idx": 3}[parts[2]]
    targets = args[0].split("|")
    d = low.define(targets[0], 1, scope)
    p = low.define(targets[1], 0, scope) if len(targets) > 1 else (low.junk[0], 2)
    a, b, c, mask = (low.use(x, 1, scope) for x in args[1:5])
    low.emit("shfl.sync", [mask, mode, d, p, a, b, c])


def vote(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    kind = parts[2]
    reg, negated = low.predicate(args[1], scope)
    out = low.define(args[0], 1 if kind == "ballot" else 0, scope)
    low.emit(f"vote.sync.{kind}", [low.use(args[2], 1, scope), out, (reg, 1), int(negated)])


def match(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    targets = args[0].split("|")
    d = low.define(targets[0], 1, scope)
    p = low.define(targets[1], 0, scope) if len(targets) > 1 else (low.junk[0], 2)
    width = 2 if parts[-1] == "b64" else 1
    mask = low.use(args[2], 1, scope)
    low.emit(".".join(parts), [mask, d, p, low.use(args[1], width, scope)])


def redux(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    mask, d = low.use(args[2], 1, scope), low.define(args[0], 1, scope)
    low.emit(".".join(parts), [mask, d, low.use(args[1], 1, scope)])


def elect(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    d, p = args[0].split("|")
    mask = low.use(args[1], 1, scope)
    low.emit("elect.sync", [mask, low.define(d, 1, scope), low.define(p, 0, scope)])


SPECIAL = {
    "bra": bra,
    "brx": brx,
    "ret": ret,
    "exit": ret,
    "call": call,
    "bar": barrier,
    "barrier": barrier,
    "shfl": shfl,
    "vote": vote,
    "match": match,
    "redux": redux,
    "elect": elect,
    "mapa": mapa,
    "getctarank": getctarank,
}
