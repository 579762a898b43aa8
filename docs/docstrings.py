"""An extension of griffe, which reads docstrings for the site: what it does not know becomes what it knows."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod):`([\w.]+)`")
_TABLE = re.compile(r"^ *={3,} +={3,}$.*?\n\n", flags=re.MULTILINE | re.DOTALL)
_SEVERAL = re.compile(r"^( {4,})(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Shows roles as code and tables as they were typed; arguments that are explained together become as many."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = _SEVERAL.sub(_separately, text)
            obj.docstring.value = _TABLE.sub(lambda table: f"```text\n{table[0].rstrip()}\n```\n\n", text)


def _separately(several: re.Match[str]) -> str:
    """The same explanation for each of the arguments."""
    return "\n".join(f"{several[1]}{name}: {several[3]}" for name in several[2].split(", "))
