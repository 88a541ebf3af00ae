"""Parts of docs/ that are made from the code and from recorded runs.

python tests/docs_tables.py     writes them; tests/test_docs.py compares
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cupyflash.bench.record import cells, columns
from cupyflash.runtime.variants import all_variants
from cupyflash.support import SUPPORT, Row

DOCS = Path(__file__).parents[1] / "docs"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def support() -> str:
    """One column a row of the support table."""
    rows = [
        ["version", *(str(r.version) for r in SUPPORT)],
        ["in this release", *(_yes(r.built) for r in SUPPORT)],
        ["compute capability", *(_capabilities(r) for r in SUPPORT)],
        ["q", *(", ".join(t.name for t in r.q_types) for r in SUPPORT)],
        ["k, v", *(", ".join(t.name for t in r.kv_types) for r in SUPPORT)],
        ["head sizes of q and k, 16 bit", *(_sizes(r, r.head_dim_step) for r in SUPPORT)],
        [
            "head sizes of q and k, 8 bit",
            *(_sizes(r, r.head_dim_step_8bit) if _8_bit(r) else "-" for r in SUPPORT),
        ],
        [
            "head sizes of v, up to",
            *(str(r.largest_head_dim_v or r.largest_head_dim) for r in SUPPORT),
        ],
        ["ALiBi", *(_yes(r.alibi) for r in SUPPORT)],
        ["sinks", *(_yes(r.sink) for r in SUPPORT)],
        ["latent attention (`q_v`)", *(_yes(r.latent) for r in SUPPORT)],
    ]
    return table(["", *(f"{r.name} kernels" for r in SUPPORT)], rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _8_bit(row: Row) -> bool:
    return any(kind.is_fp8 for kind in (*row.q_types, *row.kv_types))


def _capabilities(row: Row) -> str:
    first, last = (".".join(map(str, c)) for c in (row.first, row.last))
    return first if first == last else f"{first} and later"


def _sizes(row: Row, step: int) -> str:
    return f"multiples of {step} up to {row.largest_head_dim}"


def variants() -> str:
    """Kernels of each source and architecture."""
    counts = {arch: Counter(v.source for v in all_variants(arch)) for arch in ARCHS}
    sources = sorted(set().union(*counts.values()))
    rows = [[f"`{s}`", *(str(counts[a][s] or "-") for a in ARCHS)] for s in sources]
    rows.append(["all", *(str(sum(counts[a].values())) for a in ARCHS)])
    return table(["source", *ARCHS], rows)


def performance() -> str:
    """The benchmark of the run that docs/performance.md names."""
    page = (DOCS / "performance.md").read_text()
    (name,) = set(re.findall(r"\(results/([\w.-]+\.json)\)", page))
    run = json.loads((DOCS / "results" / name).read_text())
    header = ", ".join(f"{key} {value}" for key, value in run["header"].items() if key != "roofs")
    head = columns()
    rows = [cells({"skipped": {}, **row}) for row in run["rows"]]
    return f"{header}\n\n{table(head, rows)}"


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "support.md": {"support": support, "variants": variants},
    "performance.md": {"performance": performance},
}


def filled(page: str, text: str) -> str:
    """The text of a page with its sections made anew."""
    for name, make in SECTIONS[page].items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        first = text.index(begin) + len(begin)
        text = f"{text[:first]}{make()}\n{text[text.index(end, first) :]}"
    return text


if __name__ == "__main__":
    for page in SECTIONS:
        path = DOCS / page
        path.write_text(filled(page, path.read_text()))
