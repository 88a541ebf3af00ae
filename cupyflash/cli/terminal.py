"""What commands print: tables and progress, by rich where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

__all__ = [
    "CommandError",
    "need_matplotlib",
    "print_as_done",
    "print_pairs",
    "print_table",
    "progress",
]

T = TypeVar("T")


class CommandError(Exception):
    """A command cannot run here or as asked; the text says why and what would work."""


@cache
def _rich() -> bool:
    """Whether rich is there; says once how to get it where a person is looking."""
    try:
        import rich  # noqa: F401
    except ImportError:
        if sys.stderr.isatty():
            print("tables and a progress bar: pip install 'cupyflash[cli]'", file=sys.stderr)
        return False
    return True


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns of text; those whose cells are numbers go to the right."""
    right = [
        any(row[i] for row in rows) and all(_number(row[i]) for row in rows if row[i])
        for i in range(len(columns))
    ]
    if sys.stdout.isatty() and _rich():
        from rich.console import Console

        table = _rich_table(columns, right)
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print(_line(row, widths, right))


def print_as_done(
    columns: Sequence[str],
    widest: Sequence[str],
    items: Iterable[T],
    cells: Callable[[T], Sequence[str]],
    total: int,
) -> Iterator[T]:
    """The items; each has a row of a table, which shows as soon as the item is there.

    Parameters
    ----------
    columns : sequence of str
    widest : sequence of str
        A cell as wide as any in its column; numbers go to the right.
    items : iterable
    cells : callable
        The row of an item.
    total : int
        How many items there will be.
    """
    right = [_number(cell) for cell in widest]
    if sys.stdout.isatty() and _rich():
        yield from _live(_rich_table(columns, right), items, cells, total)
        return
    widths = [max(len(name), len(cell)) for name, cell in zip(columns, widest, strict=True)]
    print(_line(columns, widths, right), flush=True)
    for item in items:
        print(_line(cells(item), widths, right), flush=True)
        yield item


def _live(
    table: Any, items: Iterable[T], cells: Callable[[T], Sequence[str]], total: int
) -> Iterator[T]:
    from rich.console import Console, Group
    from rich.live import Live

    def shown() -> Group:
        return Group(table, f"{table.row_count} of {total}" if table.row_count < total else "")

    # Not refreshed by a thread: what is timed here is the host, too.
    console = Console(markup=False, highlight=False)
    with Live(shown(), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        live.refresh()
        for item in items:
            table.add_row(*cells(item))
            live.update(shown(), refresh=True)
            yield item


def _rich_table(columns: Sequence[str], right: Sequence[bool]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, to_right in zip(columns, right, strict=True):
        table.add_column(name, justify="right" if to_right else "left", overflow="fold")
    return table


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(row, widths, right, strict=True)
    ]
    return "  ".join(cells).rstrip()


def _number(text: str) -> bool:
    return text.strip("-+.%x0123456789") == "" or text == "-"


def need_matplotlib() -> None:
    """Refuse to go on where nothing could be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install 'cupyflash[cli]'") from error


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and what they are, one a line."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, text in listed:
        print(f"{name.ljust(width)}  {text}")


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """The items, with a bar on the terminal; without one, nothing is shown."""
    if not sys.stderr.isatty() or not _rich():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns: Any = (TextColumn(label), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        for item in items:
            yield item
            bar.advance(task)
