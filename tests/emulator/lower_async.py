"""cp.async, mbarrier; the bulk and tensor copies and wgmma."""

from __future__ import annotations

from typing import Any

from .lower_memory import CACHE
from .lower_tensor import bulk, wgmma
from .names import Scope
from .program import Lowering
from .ptx import PtxError

__all__ = ["SPECIAL"]


def cp(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    if parts[:3] == ["cp", "async", "mbarrier"]:
        rest = [p for p in parts[4:] if p not in ("shared", "shared::cta", "b64")]
        if parts[3] != "arrive" or rest not in ([], ["noinc"]):
            raise PtxError(f"unknown instruction: {low.text}")
        low.emit("cp.async.mbarrier.arrive", [*low.pointer(args[0], scope), int(not rest)])
    elif parts[:2] == ["cp", "async"] and parts[2] in ("ca", "cg"):
        rest = [p for p in parts[3:] if p not in ("shared", "shared::cta", "global")]
        if not all(CACHE.match(p) for p in rest):
            raise PtxError(f"unknown instruction: {low.text}")
        hint = "L2::cache_hint" in rest
        extra = args[3 : len(args) - hint]
        out: list[Any] = [int(args[2], 0), 2, *low.pointer(args[0], scope)]
        out += low.pointer(args[1], scope)
        size: Any = -1
        ignore: Any = -1
        if extra:
            reg = scope.register(extra[0].lstrip("!"))
            if reg is not None and reg.width == 0:
                ignore = (reg, 1)
            else:
                size = low.use(extra[0], 1, scope)
        if out[0] not in (4, 8, 16) or (parts[2] == "cg" and out[0] != 16):
            raise PtxError(f"copy of {out[0]} bytes: {low.text}")
        low.emit("cp.async", [*out, size, ignore])
    elif "bulk" in parts:
        bulk(low, parts, args, scope)
    else:
        raise PtxError(f"unknown instruction: {low.text}")


def fence(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """fence with default semantics; the other spellings are in the table."""
    if parts[1] in ("cta", "cluster", "gpu", "sys"):
        low.emit(f"fence.acq_rel.{parts[1]}", [])
    elif parts[1:3] == ["proxy", "async"] or parts[1:3] == ["proxy", "alias"]:
        low.emit("fence.proxy.async", [])
    else:
        raise PtxError(f"unknown instruction: {low.text}")


def mbarrier(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """init, inval, expect_tx, complete_tx, arrive(.expect_tx, _drop), test_wait, try_wait."""
    what = parts[1]
    known = {"shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed"}
    known |= {"cta", "cluster", "expect_tx", "parity", "noComplete"}
    if unknown := [p for p in parts[2:] if p not in known]:
        raise PtxError(f"unknown {'.'.join(unknown)} in: {low.text}")
    if what == "init":
        low.emit("mbarrier.init", [*low.pointer(args[0], scope), low.use(args[1], 1, scope)])
    elif what == "inval":
        low.emit("mbarrier.inval", low.pointer(args[0], scope))
    elif what in ("expect_tx", "complete_tx"):
        count = low.use(args[1], 1, scope)
        where = low.pointer(args[0], scope)
        if what == "complete_tx":
            low.emit("mbarrier.complete_tx", [*where, count])
        else:
            low.emit("mbarrier.arrive", [*where, (low.junk[2], 2), -1, count, 4])
    elif what in ("arrive", "arrive_drop"):
        has_state = not args[0].startswith("[")
        state = low.define(args[0], 2, scope) if has_state else (low.junk[2], 2)
        rest = args[1:] if has_state else args
        value: Any = low.use(rest[1], 1, scope) if len(rest) > 1 else -1
        expect = "expect_tx" in parts
        flags = int(what == "arrive_drop") | 2 * int("relaxed" in parts)
        flags |= 8 * int("cluster" in parts) | 16 * int(has_state and args[0].strip() != "_")
        out = [
            *low.pointer(rest[0], scope),
            state,
            -1 if expect else value,
            value if expect else -1,
        ]
        low.emit("mbarrier.arrive", [*out, flags])
    elif what in ("test_wait", "try_wait"):
        parity = "parity" in parts
        p = low.define(args[0], 0, scope)
        phase = low.use(args[2], 1 if parity else 2, scope)
        flags = int(parity) | 2 * int(what == "try_wait") | 4 * int("relaxed" in parts)
        flags |= 8 * int("cluster" in parts)
        low.emit("mbarrier.wait", [p, *low.pointer(args[1], scope), phase, flags])
    else:
        raise PtxError(f"unknown instruction: {low.text}")


SPECIAL = {"cp": cp, "mbarrier": mbarrier, "wgmma": wgmma, "fence": fence}
