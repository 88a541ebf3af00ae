"""Bugs that are chosen while a kernel runs: one compiled text holds many.

The statements that a bug changes, or the expression, become two with a switch before them. What is
known when the text is compiled (constants, members of classes) has no switch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SWITCH", "switched"]

SWITCH = "planted_bug"  # the variable that holds the number of the bug, 0 for none
_HEAD = f"""__device__ unsigned {SWITCH};
static __device__ __forceinline__ bool planted(unsigned bug) {{
  unsigned chosen;
  asm volatile("ld.global.u32 %0, [{SWITCH}];" : "=r"(chosen));
  return chosen == bug;
}}
"""
_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/)|(?P<directive>(?<=\n)[ \t]*\#[^\n]*)"
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|\w+|->|::|&&|\|\||<<|[-+*/%&|^<>=!]=|.',
    re.DOTALL,
)
_CONTROL = {"if", "for", "while", "switch", "do"}
_DECLARATION = re.compile(
    r"(?:const|constexpr|static|auto|using|struct|typename|unsigned|long)\b"
    r"|(?!(?:return|else|asm|goto|if|for|while|do)\b)[A-Za-z_][\w:]*(?:<[^;{}]*>[\w:]*)?"
    r"[\s*&]*\s[*&]*[A-Za-z_]\w*\s*[=;,({\[]"
)


@dataclass
class _Text:
    """Tokens of a text; of each bracket its partner, of each token the brackets around it."""

    text: str

    def __post_init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.words: list[str] = []
        for found in _TOKEN.finditer(self.text):
            if found.lastgroup != "space":
                self.starts.append(found.start())
                self.ends.append(found.end())
                self.words.append("#" if found.lastgroup else found[0])
        self.partner: dict[int, int] = {}
        self.around: list[int] = []
        opened: list[int] = []
        for i, word in enumerate(self.words):
            if word in ")]}" and opened:
                first = opened.pop()
                self.partner[first], self.partner[i] = i, first
            self.around.append(opened[-1] if opened else -1)
            if word in "([{":
                opened.append(i)

    def touched(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the last token of a piece of text; one beside it if there is none."""
        first = next(i for i, at in enumerate(self.ends) if at > begin)
        if self.starts[first] >= end and self.words[first] in ")],;":
            first -= 1
        last = first
        while last + 1 < len(self.starts) and self.starts[last + 1] < end:
            last += 1
        return first, last

    def enclosing(self, first: int, last: int) -> list[int]:
        """The brackets around both tokens, from the inside."""
        found = []
        at = self.around[first]
        while at >= 0:
            if self.partner[at] > last:
                found.append(at)
            at = self.around[at]
        return found

    def skip(self, at: int, until: str) -> int:
        """The first token of ``until`` from here on, past brackets."""
        while self.words[at] not in until:
            at = self.partner[at] + 1 if self.words[at] in "([{" else at + 1
        return at

    def statement_end(self, at: int) -> int:
        """The last token of the statement that begins here."""
        words = self.words
        if words[at] == "#":
            return self.statement_end(at + 1)
        if words[at] == "{":
            return self.partner[at]
        if words[at] == "do":
            return self.skip(self.statement_end(at + 1) + 1, ";")
        if words[at] in _CONTROL:
            opening = self.skip_to_bracket(at)
            end = self.statement_end(self.partner[opening] + 1)
            if words[at] == "if" and words[end + 1] == "else":
                return self.statement_end(end + 2)
            return end
        if words[at] in ("case", "default"):
            return self.skip(at, ":")
        return self.skip(at, ";}")

    def skip_to_bracket(self, at: int) -> int:
        while self.words[at] != "(":
            at += 1
        return at

    def is_body(self, opening: int) -> bool:
        """Whether a brace opens a list of statements."""
        before = self.words[opening - 1]
        return before in (")", "else", "do", "const", ";", "{", "}", "#", ":")

    def declares(self, at: int) -> bool:
        return bool(_DECLARATION.match(self.text, self.starts[at]))


def _statements(text: _Text, first: int, last: int) -> tuple[int, int] | None:
    """The fewest whole statements around two tokens, or None where they declare something."""
    opening = next((b for b in text.enclosing(first, last) if text.words[b] == "{"), None)
    if opening is None or not text.is_body(opening):
        return None
    at = opening + 1
    while (end := text.statement_end(at)) < first:
        at = end + 1
    begin = at
    while True:  # into the statement of an if or a loop
        inner = at
        while text.words[inner] == "#":
            inner += 1
        if text.words[inner] not in ("if", "for", "while"):
            break
        body = text.partner[text.skip_to_bracket(inner)] + 1
        body_end = text.statement_end(body)
        if body <= first and last <= body_end and text.words[body] != "{":
            begin = at = body
        elif text.words[body_end + 1] == "else" and body_end + 2 <= first:
            begin = at = body_end + 2
        else:
            break
        end = text.statement_end(at)
    while end < last:
        at = end + 1
        end = text.statement_end(at)
    ends_block = text.words[end + 1] == "}"  # so that nothing else uses what is declared
    at = begin
    while at <= end:
        if (text.declares(at) and not ends_block) or text.words[at] in ("case", "default"):
            return None
        at = text.statement_end(at) + 1
    return begin, end


def _expression(text: _Text, first: int, last: int) -> tuple[int, int] | None:
    """The smallest argument, condition or first value around two tokens."""
    for opening in text.enclosing(first, last):
        if text.words[opening] == "{":
            break
        if text.words[opening] == "[" or text.words[opening - 1] == "asm":
            continue
        if text.words[opening - 1] == "volatile":
            return None
        begin = at = opening + 1
        ends = ",;)"
        while (end := text.skip(at, ends)) <= last:
            at = end + 1
            if end < first or text.words[end] == ";":
                begin = at
        return (begin, end - 1) if begin <= first else None
    return _first_value(text, first, last)


def _first_value(text: _Text, first: int, last: int) -> tuple[int, int] | None:
    around = [b for b in text.enclosing(first, last) if text.words[b] == "{"]
    if not around or not text.is_body(around[0]):
        return None
    at = around[0] + 1
    while (end := text.statement_end(at)) < first:
        at = end + 1
    if text.words[at] in ("static", "constexpr"):
        return None
    while (equals := text.skip(at, "=,;")) < first:
        if text.words[equals] == "=":
            begin = equals + 1
            end = text.skip(begin, ",;")
            if begin <= first and last < end:
                return begin, end - 1
        at = equals + 1
    return None


def _trimmed(old: str, new: str) -> tuple[int, int]:
    """How many characters both begin with, and end with."""
    most = min(len(old), len(new))
    head = 0
    while head < most and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < most - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return head, tail


def _known_when_compiled(text: _Text, first: int, last: int) -> bool:
    bodies = [b for b in text.enclosing(first, last) if text.words[b] == "{"]
    for opening in bodies:
        at = opening - 1
        while at > 0 and text.words[at] not in ";{}#":
            at = text.partner[at] - 1 if text.words[at] in ")]" else at - 1
        header = text.words[at + 1 : opening]
        if "constexpr" in header and "if" not in header:
            return True
    return False


Change = tuple[int, int, int, str]  # number of the bug, begin and end in the text, what is there


def _region(text: _Text, begin: int, end: int) -> tuple[int, int, bool] | None:
    """Begin and end of what has to be there twice, and whether it is statements."""
    first, last = text.touched(begin, end)
    if _known_when_compiled(text, first, last):
        return None
    inside = next(iter(text.enclosing(first, last)), 0)
    condition = text.words[inside] == "(" and text.words[inside - 1] in ("if", "for", "while")
    found = None if condition else _statements(text, first, last)
    if found:
        return text.starts[found[0]], text.ends[found[1]], True
    found = _expression(text, first, last)
    return (text.starts[found[0]], text.ends[found[1]], False) if found else None


def switched(text: str, bugs: Sequence[tuple[str, str]]) -> tuple[str, dict[int, int]]:
    """``text`` with switches for ``bugs`` (pattern, replacement).

    Returns
    -------
    text : str
    numbers : dict
        How often bug i (from 1) is in it; those without a switch are not there.
    """
    parsed = _Text(text)
    changes: list[tuple[int, int, bool, Change]] = []
    numbers: dict[int, int] = {}
    for number, (pattern, replacement) in enumerate(bugs, 1):
        mine = []
        for found in re.finditer(pattern, text):
            new = found.expand(replacement)
            head, tail = _trimmed(found[0], new)
            begin, end = found.start() + head, found.end() - tail
            new = new[head : len(new) - tail]
            region = _region(parsed, begin, end)
            if region is None:
                mine = []
                break
            # White space and comments around what changes may lie outside.
            change = (number, max(begin, region[0]), min(end, region[1]), new)
            mine.append((*region, change))
        if mine:
            numbers[number] = len(mine)
            changes += mine
    return _HEAD + _joined(text, changes), numbers


def _joined(text: str, changes: list[tuple[int, int, bool, Change]]) -> str:
    """Regions that overlap are one."""
    pieces, at = [], 0
    changes.sort(key=lambda c: (c[0], -c[1]))
    while changes:
        begin, end, statements, change = changes.pop(0)
        inside = [change]
        while changes and changes[0][0] < end:
            more = changes.pop(0)
            if more[1] > end:
                raise ValueError(f"regions cross: {text[more[0] : more[1]]!r}")
            inside.append(more[3])
        pieces.append(text[at:begin])
        pieces.append(_choice(text[begin:end], begin, statements, inside))
        at = end
    return "".join([*pieces, text[at:]])


def _choice(old: str, begin: int, statements: bool, changes: list[Change]) -> str:
    made = old
    for number in sorted({c[0] for c in changes}, reverse=True):
        new = old
        mine = [change for change in changes if change[0] == number]
        for _, first, last, what in sorted(mine, key=lambda change: -change[1]):
            new = new[: first - begin] + what + new[last - begin :]
        if statements:
            made = f"if (planted({number})) {{ {new}\n}} else {{ {made}\n}}"
        else:
            made = f"(planted({number}) ? ({new}) : ({made}))"
    return f"{{ {made} }}" if statements else made
