"""Parts of docs/ and README.md that are made from the code and from recorded runs.

python tests/docs_tables.py     writes them; tests/test_docs.py compares
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cupyflash.bench.record import cells, columns
from cupyflash.runtime.variants import every_variant
from cupyflash.support import SUPPORT, Row

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUNS = (
    "2026-11-30-h200-a237cb3e",
    "2026-12-01-h200-0d6578bc",
    "2026-12-01-h200-1863ec06",
)
"""Of docs/results/, each with a page and a benchmark; of a case the last that has it counts."""
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
    counts = {arch: Counter(v.source for v in every_variant(arch)) for arch in ARCHS}
    sources = sorted(set().union(*counts.values()))
    rows = [[f"`{s}`", *(str(counts[a][s] or "-") for a in ARCHS)] for s in sources]
    rows.append(["all", *(str(sum(counts[a].values())) for a in ARCHS)])
    return table(["source", *ARCHS], rows)


def record() -> str:
    links = ", ".join(
        f"[{run}](results/{run}-bench.json) ([what else was run](results/{run}.md))" for run in RUNS
    )
    return f"Made from {links}; of a case the last run that has it."


def recorded() -> dict[str, tuple[str, dict[str, Any]]]:
    """Run and row of each case."""
    return {row["case"]: (run, row) for run in RUNS for row in result(run)["rows"]}


def result(run: str) -> dict[str, Any]:
    return json.loads((DOCS / f"results/{run}-bench.json").read_text())


def performance() -> str:
    """Every case."""
    found = recorded().values()
    headers = []
    for run in RUNS:
        about = ", ".join(f"{k} {v}" for k, v in result(run)["header"].items() if k != "roofs")
        headers.append(f"{sum(of == run for of, _ in found)} cases: {about}")
    rows = [cells({"skipped": {}, **row}) for _, row in found]
    return "\n\n".join((*headers, table(columns(), rows)))


KINDS = {
    "decode": "decode/",
    "decode with prefill in one batch": "mixed/",
    "prefill, 16 bit": ("prefill/", "paged-", "chunked-", "window-", "softcap-", "ragged-"),
    "prefill, 8 bit": "prefill-fp8/",
    "latent attention": "mla/",
    "shared prefixes": "shared-prefix/",
}


def ratios(case: str | tuple[str, ...]) -> dict[str, float]:
    """The fastest peer's time over ours, by case."""
    found = {}
    for _, row in recorded().values():
        times = dict(row["us"])
        ours = times.pop("cupyflash", None)
        if ours and times and row["case"].startswith(case):
            found[row["case"]] = min(times.values()) / ours
    return found


def means() -> str:
    rows = []
    for kind, cases in KINDS.items():
        if found := list(ratios(cases).values()):
            figures = (geometric_mean(found), min(found), max(found))
            rows.append([kind, str(len(found)), *(f"{figure:.2f}" for figure in figures)])
    return table(["", "cases", "geometric mean", "lowest", "highest"], rows)


def behind() -> str:
    """Where a peer was faster."""
    found = sorted((ratio, case) for case, ratio in ratios("").items() if ratio < 1)
    return table(["case", "peer / ours"], [[case, f"{ratio:.3f}"] for ratio, case in found])


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/support.md": {"support": support, "variants": variants},
    "docs/performance.md": {
        "record": record,
        "means": means,
        "performance": performance,
        "behind": behind,
    },
    "README.md": {"means": means},
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
        path = ROOT / page
        path.write_text(filled(page, path.read_text()))
