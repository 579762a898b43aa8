"""Tables as values, and their output as Markdown or on a console."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

_WIDTH = 120  # columns, where the output is no terminal
_LONG_HEADING = 8  # characters of a word in a column's name, after which it may be broken
_LONG_WORD = 16  # characters, from which on words of texts, such as paths, may be broken


class Table(NamedTuple):
    """Texts in lines and columns.

    Attributes:
        title: the text above the table, if any.
        header: the names of the columns; empty if they have none.
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
    """Print a table on a console; columns of figures are justified right.

    Figures, keys and short words are never broken: a table that is too wide for the console is printed as wide as they
    need.
    """
    made = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_header=bool(table.header))
    names = [_folded(name) for name in table.header] or [""] * len(table.lines[0])
    columns = [[line[index] for line in table.lines] for index in range(len(names))]
    holds_figures = [all(not cell or cell[0].isdigit() for cell in cells) for cells in columns]
    natural, least = [], []
    for index, texts in enumerate([name, *cells] for name, cells in zip(names, columns, strict=True)):
        natural.append(_longest(line for text in texts for line in text.splitlines()))
        words = [word for text in texts[1:] for word in text.split()]
        if not holds_figures[index]:
            words = [word for word in words if len(word) < _LONG_WORD]
        heading = min(_longest(texts[0].split()), _LONG_HEADING)
        least.append(natural[-1] if index < table.keys else max(heading, _longest(words)))
    widths = _fitted(natural, least, console.width - 2 * len(names) + 1)  # less spaces after and between columns
    for name, has_figures, width in zip(names, holds_figures, widths, strict=True):
        # Rich makes columns of a "width" narrower where it thinks that they do not fit.
        justify: Literal["left", "right"] = "right" if has_figures else "left"
        made.add_column(escape(name), justify=justify, overflow="fold", min_width=width, max_width=width)
    for line in table.lines:
        made.add_row(*map(escape, line))
    if table.title:
        say(f"\n{table.title}", console)
    console.print(made, crop=False)
    for note in table.notes:
        say(note, console)


class _Console(Console):
    """Leaves it to the command what follows when nobody reads its output any longer."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def open_console() -> Console:
    """Return a console on the standard output, with a fixed width if that is no terminal and no
    environment variable says how wide it is.
    """
    return _Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH)


def say(text: str, console: Console) -> None:
    """Print a text without markup."""
    console.print(text, markup=False, highlight=False)


def _fitted(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widths of columns, narrowed from the widest on until they fit, but to no less than ``least``."""
    widths = [*natural]
    while sum(widths) > room:
        wide = [index for index, width in enumerate(widths) if width > least[index]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _folded(name: str) -> str:
    """Return the name of a column, folded to short lines."""
    for mark in ".-":
        name = name.replace(mark, f"{mark} ")
    return name.replace(" ", "\n")
