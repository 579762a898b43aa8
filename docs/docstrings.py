"""An extension of griffe, which reads docstrings for the site: what it does not know becomes what it knows."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod):`([\w.]+)`")
_TABLE = re.compile(r"^ *(=+ +)=+\n(.*?)\n *=+ +=+$", flags=re.MULTILINE | re.DOTALL)
_SEVERAL = re.compile(r"^( {4,})(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Roles of reStructuredText become links, its tables tables; arguments that are explained together as many."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            text = _ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', obj.docstring.value)
            obj.docstring.value = _TABLE.sub(_table, _SEVERAL.sub(_separately, text))


def _separately(several: re.Match[str]) -> str:
    """The same explanation for each of the arguments."""
    return "\n".join(f"{several[1]}{name}: {several[3]}" for name in several[2].split(", "))


def _table(table: re.Match[str]) -> str:
    """A table of two columns; a line whose first column is empty continues the one before."""
    rows: list[list[str]] = []
    for line in table[2].splitlines():
        first, second = line[: len(table[1])].strip(), line[len(table[1]) :].strip()
        if first:
            rows.append([first, second])
        else:
            rows[-1][1] += f" {second}"
    return "\n".join(["| | |", "|---|---|", *(f"| {first} | {second} |" for first, second in rows)])
