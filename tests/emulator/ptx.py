"""PTX text as functions, symbols and statements. Knows no instruction."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

__all__ = ["Function", "Module", "PtxError", "Symbol", "parse"]

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"[^\n]*$', re.M)
_SECTION = re.compile(r"^\s*\.section\s+\S+\s*\{.*?^\s*\}", re.M | re.S)
_VARIABLE = re.compile(
    r"(?P<extern>\.(?:extern|visible|weak|common)\s+)?\.(?P<space>shared|global|const|local|param)"
    r"\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+)(?P<bits>\d+)\s+(?P<name>[\w$%]+)"
    r"(?P<dims>(?:\s*\[\d*\])*)(?:\s*=\s*(?P<init>.*))?$",
    re.S,
)
_HEADER = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(?P<kind>entry|func)\s*(?:\((?P<ret>[^)]*)\)\s*)?"
    r"(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?\s*(?P<rest>[^{;]*)(?P<end>[{;])"
)
_ITEM = re.compile(
    r"(?P<space>\s+)|\.loc\s+(?P<loc>[^\n]*)|(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+)\s*:(?!:)"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)"
)


class PtxError(Exception):
    """PTX that the emulator does not model, found when a program is loaded."""


@dataclass
class Symbol:
    """A variable: name, state space, alignment, bytes, initial value (None: none or zero)."""

    name: str
    space: str
    align: int
    nbytes: int
    data: bytes | None = None
    dynamic: bool = False


@dataclass
class Function:
    """``items`` are ("loc", text), ("open",), ("close",), ("label", name), ("do", statement)."""

    name: str
    kind: str
    returns: list[Symbol]
    params: list[Symbol]
    items: list[tuple[str, ...]] = field(default_factory=list)
    attributes: str = ""


@dataclass
class Module:
    functions: dict[str, Function]
    symbols: dict[str, Symbol]
    files: dict[int, str]


def variable(text: str) -> Symbol:
    """One declaration, without its semicolon."""
    m = _VARIABLE.match(text.strip())
    if not m:
        raise PtxError(f"declaration: {text.strip()[:120]}")
    size = SIZES[m["bits"]]
    dims = re.findall(r"\[(\d*)\]", m["dims"])
    dynamic = dims == [""]
    count = 1
    for d in dims:
        count *= int(d) if d else 0
    align = max(int(m["align"] or size), 1)
    data = _initial(m["init"], m["type"], size) if m["init"] else None
    return Symbol(m["name"], m["space"], align, size * count, data, dynamic)


def _initial(text: str, kind: str, size: int) -> bytes:
    out = b""
    for word in re.findall(r"[^\s,{}]+", text):
        if word[:2].lower() in ("0f", "0d") and kind == "f":
            value = int(word[2:], 16)
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", word):
            value = int(word.rstrip("U"), 0)
        else:
            raise PtxError(f"initial value {word}")
        out += struct.pack("<q" if value < 0 else "<Q", value)[:size]
    return out


def _params(text: str | None) -> list[Symbol]:
    return [variable(p) for p in text.split(",") if p.strip()] if text else []


def _body(text: str, at: int) -> tuple[list[tuple[str, ...]], int]:
    items: list[tuple[str, ...]] = []
    depth = 1
    while depth:
        m = _ITEM.match(text, at)
        if not m:
            raise PtxError(f"statement: {text[at : at + 80]!r}")
        at = m.end()
        kind = m.lastgroup
        if kind == "space":
            continue
        if kind == "open":
            depth += 1
            items.append(("open",))
        elif kind == "close":
            depth -= 1
            if depth:
                items.append(("close",))
        elif kind == "loc":
            items.append(("loc", m["loc"]))
        elif kind == "label":
            items.append(("label", m["label"]))
        else:
            items.append(("do", " ".join(m["statement"][:-1].split())))
    return items, at


def parse(text: str) -> Module:
    """The functions, module-level variables and source files of one PTX module."""
    files = {int(n): name for n, name in _FILE.findall(text)}
    text = _SECTION.sub("", _FILE.sub("", _COMMENT.sub("", text)))
    module = Module({}, {}, files)
    at = 0
    directive = re.compile(r"\s*\.(version|target|address_size)[^\n]*\n")
    while True:
        at = re.compile(r"\s*").match(text, at).end()
        if at >= len(text):
            return module
        if m := directive.match(text, at):
            at = m.end()
        elif m := _HEADER.match(text, at):
            f = Function(m["name"], m["kind"], _params(m["ret"]), _params(m["params"]))
            f.attributes = " ".join(m["rest"].split())
            at = m.end()
            if m["end"] == "{":
                f.items, at = _body(text, at)
                module.functions[f.name] = f
        else:
            end = text.find(";", at)
            if end < 0:
                raise PtxError(f"module-level text: {text[at : at + 80]!r}")
            s = variable(text[at:end])
            module.symbols[s.name] = s
            at = end + 1
