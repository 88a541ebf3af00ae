"""Bulk and tensor copies, their reductions and waits; wgmma."""

from __future__ import annotations

import re
from typing import Any

from .lower_memory import ATOMIC_OPS, ATOMIC_TYPES, CACHE, pieces
from .names import USE, Scope
from .program import Lowering
from .ptx import PtxError

__all__ = ["bulk", "wgmma"]

WGMMA_TYPES = {"f16": 0, "bf16": 1, "e4m3": 2, "e5m2": 3}


def split_tensor(text: str) -> tuple[str, list[str]]:
    """``[map, {c0, c1}]`` as the map's address and the coordinates."""
    m = re.match(r"\[\s*(.+?)\s*,\s*\{(.*)\}\s*\]$", text)
    if not m:
        raise PtxError(f"tensor operand {text}")
    return m[1], [x.strip() for x in m[2].split(",")]


def unknown(low: Lowering) -> PtxError:
    return PtxError(f"unknown instruction: {low.text}")


def bulk(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    """Everything that begins with cp.async.bulk or cp.reduce.async.bulk."""
    reduce = parts[1] == "reduce"
    rest = parts[4 if reduce else 3 :]
    if rest[:1] == ["commit_group"]:
        low.emit("cp.async.bulk.commit_group", [])
        return
    if rest[:1] == ["wait_group"]:
        low.emit("bulk.wait", [int(args[0], 0), int("read" in rest)])
        return
    hinted = "cache_hint" in rest or "L2::cache_hint" in rest
    rest = [p for p in rest if not CACHE.match(p)]
    args = args[: len(args) - hinted] if hinted else args
    if rest[:1] == ["prefetch"]:
        if "tensor" in rest:
            where, coords = split_tensor(args[0])
            low.emit("tensor.prefetch", [len(coords), *low.pointer(where, scope)])
        else:
            low.emit("prefetch", [])
        return
    tensor = rest[0] == "tensor"
    if tensor:
        rank = int(rest[1][0])
        rest = [p for p in rest[2:] if p != "tile"]
    if any(p.startswith(("im2col", "tile::")) for p in rest) or "cta_group" in ".".join(rest):
        raise PtxError(f"not modelled: {low.text}")
    mask = None
    if "multicast::cluster" in rest:
        rest.remove("multicast::cluster")
        mask, args = args[-1], args[:-1]
    if rest[0] in ("shared::cluster", "shared::cta") and rest[1] in ("global", "shared::cta"):
        shared = rest[1] == "shared::cta"
        if rest[2:] != ["mbarrier::complete_tx::bytes"] or (shared and (tensor or mask)):
            raise unknown(low)
        load(low, args, rank if tensor else 0, mask, shared, scope)
    elif rest[0] == "global" and rest[1] == "shared::cta":
        tail = [p for p in rest[2:] if p not in ("bulk_group", "noftz")]
        operation = kind = None
        if reduce:
            operation, *types = tail
            kind = types[0] if types else None
        elif tail:
            raise unknown(low)
        store(low, args, rank if tensor else 0, operation, kind, scope)
    else:
        raise unknown(low)


def load(
    low: Lowering, args: list[str], rank: int, mask: str | None, shared: bool, scope: Scope
) -> None:
    dst = low.pointer(args[0], scope)
    to: Any = -1 if mask is None else low.use(mask, 1, scope)
    if rank:
        where, coords = split_tensor(args[1])
        if len(coords) != rank:
            raise unknown(low)
        out: list[Any] = [rank, *dst, *low.pointer(where, scope), *low.pointer(args[2], scope), to]
        low.emit("tensor.load", out + [low.use(c, 1, scope) for c in coords])
    else:
        source, size, mbar = args[1:4]
        out = [*dst, *low.pointer(source, scope), low.use(size, 1, scope)]
        low.emit("bulk.load", [*out, *low.pointer(mbar, scope), to, int(shared)])


def store(
    low: Lowering, args: list[str], rank: int, operation: str | None, kind: str | None, scope: Scope
) -> None:
    code = 1 + ATOMIC_OPS.index(operation) if operation else 0
    if rank:
        where, coords = split_tensor(args[0])
        out: list[Any] = [rank, *low.pointer(where, scope), *low.pointer(args[1], scope), code]
        low.emit("tensor.store", out + [low.use(c, 1, scope) for c in coords])
        return
    kind = {"b32": "u32", "b64": "u64"}.get(kind or "u32", kind or "u32")
    if kind not in ATOMIC_TYPES:
        raise unknown(low)
    out = [*low.pointer(args[0], scope), *low.pointer(args[1], scope)]
    out += [low.use(args[2], 1, scope), code, ATOMIC_TYPES.index(kind)]
    low.emit("bulk.store", out)


def wgmma(low: Lowering, parts: list[str], args: list[str], scope: Scope) -> None:
    m = re.match(r"m64n(\d+)k(16|32)$", parts[4] if len(parts) > 4 else "")
    if parts[1:4] != ["mma_async", "sync", "aligned"] or not m or len(parts) != 8:
        raise unknown(low)
    n, accumulator, a, b = int(m[1]), parts[5], parts[6], parts[7]
    wide = a in ("f16", "bf16")
    if accumulator not in ("f32", "f16") or a not in WGMMA_TYPES or b not in WGMMA_TYPES:
        raise unknown(low)
    if int(m[2]) != (16 if wide else 32) or (wide and a != b) or n % 8 or not 8 <= n <= 256:
        raise unknown(low)
    half = accumulator == "f16"
    in_registers = args[1].startswith("{")
    scale_a, scale_b = int(args[4], 0), int(args[5], 0)
    major = [int(x, 0) for x in args[6:]]
    if len(major) != ((1 if in_registers else 2) if wide else 0):
        raise unknown(low)
    trans_a = major[0] if len(major) == 2 else 0
    trans_b = major[-1] if major else 0
    out: list[Any] = [n, WGMMA_TYPES[a], WGMMA_TYPES[b], scale_a, scale_b, trans_a, trans_b]
    out += [int(in_registers), int(half)]
    text = args[3].strip()
    if re.fullmatch(r"\d+", text) or text in ("true", "false"):
        out.append((low.const(0, 0 if text in ("0", "false") else 0xFFFFFFFF), USE))
    else:
        out.append((low.predicate(text, scope)[0], USE))
    out.append(low.use(args[2], 2, scope))
    if in_registers:
        sources = [low.use(x, 1, scope) for x in pieces(args[1])]
        if len(sources) != 4:
            raise unknown(low)
        out += sources
        low.wgmma_regs.update((reg, None) for reg, _ in sources)
    else:
        out.append(low.use(args[1], 2, scope))
    accumulators = [low.define(x, 1, scope)[0] for x in pieces(args[0])]
    if len(accumulators) != n // (4 if half else 2):
        raise unknown(low)
    low.wgmma_regs.update(dict.fromkeys(accumulators))
    out += [(reg, 3) for reg in accumulators]
    insn = low.emit("wgmma.mma_async", out)
    insn.is_wgmma = True
