"""Tables as values, and their output as Markdown or on a console."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

_WIDTH = 120  # columns, where the output is no terminal


class Table(NamedTuple):
    """Texts in lines and columns.

    Attributes:
        title: the text above the table.
        header: the names of the columns.
        lines: the lines, each with a text for each column, maybe empty.
        keys: number of the first columns that describe a line; they are never folded.
        notes: the lines of text below the table.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    keys: int = 0
    notes: Sequence[str] = ()


def to_markdown(table: Table) -> str:
    """Return a table as Markdown."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (table.header, *table.lines)]
    first, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([f"{table.title}:", "", first, "|" + "---|" * len(table.header), *rest, "", *table.notes])


def print_table(table: Table, console: Console) -> None:
    """Print a table on a console; columns of figures are justified right."""
    made = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(table.header):
        holds_figures = all(not line[index] or line[index][0].isdigit() for line in table.lines)
        made.add_column(
            _folded(name),
            justify="right" if holds_figures else "left",
            no_wrap=index < table.keys,
            overflow="fold",
        )
    for line in table.lines:
        made.add_row(*line)
    say(f"\n{table.title}", console)
    console.print(made)
    for note in table.notes:
        say(note, console)


def open_console() -> Console:
    """Return a console on the standard output, with a fixed width if that is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


def say(text: str, console: Console) -> None:
    """Print a text without markup."""
    console.print(text, markup=False, highlight=False)


def _folded(name: str) -> str:
    """Return the name of a column, folded to short lines."""
    for mark in ".-":
        name = name.replace(mark, f"{mark} ")
    return name.replace(" ", "\n")
