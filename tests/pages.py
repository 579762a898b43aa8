"""Code blocks of Markdown pages, which tests execute as they are printed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
ON_A_GPU = 'title="on a GPU"'


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: the first word after its fence: ``python``; ``sh`` for commands that tests run; ``bash`` for others.
        needs_gpu: whether its title says that it is for a GPU.
        line: of its first line in the page, from 1 on.
        text: what is between the fences.
    """

    language: str
    needs_gpu: bool
    line: int
    text: str


def page(name: str) -> str:
    """A page of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name: str) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", page(name))


def blocks(name: str, language: str) -> list[Block]:
    """The blocks of a page in one language, in order."""
    text = page(name)
    found = [
        Block(block[1], ON_A_GPU in block[2], text.count("\n", 0, block.start(3)) + 1, block[3])
        for block in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def execute(name: str, *, gpu: bool = False) -> dict[str, Any]:
    """Run the python blocks of a page one after the other in one module, whose names are returned.

    Args:
        name: of the page.
        gpu: whether those are run, too, that are for a GPU.
    """
    module = ModuleType(re.sub(r"\W", "_", name))
    sys.modules[module.__name__] = module  # where torch.compile looks for what functions of the page refer to
    try:
        for block in blocks(name, "python"):
            if gpu or not block.needs_gpu:
                lines = "\n" * (block.line - 1)  # so that a traceback has the page's lines
                exec(compile(lines + block.text, ROOT / name, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module.__dict__


def commands(name: str, language: str = "sh") -> Iterator[list[str]]:
    """The words of each command that blocks of a shell hold, comments left out."""
    for block in blocks(name, language):
        for command in re.split(r"&&|\n", block.text.replace("\\\n", " ")):
            if words := shlex.split(command, comments=True):
                yield words
