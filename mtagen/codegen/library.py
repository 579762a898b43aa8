"""Link emitted sources with libraries, so that they have no unused code.

A library is CUDA's headers, or functions for a Python module. It is a list of paragraphs, most of
which define names: a function with its comment, a constant, an import. A source gets the paragraphs
that define what it names, and what these paragraphs name in turn.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import NamedTuple

_INCLUDE = '#include "'
_SPACES = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")}


class Paragraph(NamedTuple):
    """A paragraph of a library.

    Attributes:
        text: its lines.
        defines: the names that it defines. A paragraph that is only a comment counts as defining
            all names that the paragraphs up to the next such comment define.
        needs: the names in its code.
    """

    text: str
    defines: frozenset[str]
    needs: frozenset[str]


class Header(NamedTuple):
    """A header: the headers that it includes, and its paragraphs."""

    includes: tuple[str, ...]
    paragraphs: tuple[Paragraph, ...]


def linked_cuda(source: str) -> str:
    """Return a source with the paragraphs that it needs of each header, where the header is first
    included.
    """
    included: set[str] = set()
    parts: list[str | Paragraph] = []
    for line in source.splitlines():
        if line.startswith(_INCLUDE):
            parts += _paragraphs(_included(line), included)
        else:
            parts.append(line)
    library = [part for part in parts if isinstance(part, Paragraph)]
    needed = _needed(_names([part for part in parts if isinstance(part, str)]), library)
    return "\n".join(
        part if isinstance(part, str) else f"\n{part.text}\n"
        for part in parts
        if isinstance(part, str) or not part.defines or part.defines & needed
    )


def linked_python(library: str, *code: str) -> str:
    """Return the definitions of a Python library that parts of code need, in the library's order."""
    paragraphs = _definitions(library)
    needed = _needed(frozenset[str]().union(*map(_read_in, code)), paragraphs)
    return "\n".join(one.text for one in paragraphs if one.defines & needed)


@lru_cache(maxsize=64)
def _definitions(library: str) -> tuple[Paragraph, ...]:
    """Return the paragraphs of a Python library: definitions and imports, with the lines before."""
    lines, end = library.splitlines(), 0
    paragraphs = []
    for node in ast.parse(library).body:
        assert node.end_lineno
        text, end = "\n".join(lines[end : node.end_lineno]), node.end_lineno
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names = [alias.asname or alias.name.partition(".")[0] for alias in aliases]
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                raise ValueError(ast.unparse(node))
        paragraphs.append(Paragraph(text, frozenset(names), _read(node)))
    return tuple(paragraphs)


@lru_cache(maxsize=16)  # the same kernels and host functions are linked with several libraries
def _read_in(code: str) -> frozenset[str]:
    return _read(ast.parse(code))


def _read(tree: ast.AST) -> frozenset[str]:
    """Return the names that Python code reads."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return frozenset(node.id for node in names if isinstance(node.ctx, ast.Load))


def _needed(named: Iterable[str], library: Sequence[Paragraph]) -> set[str]:
    """Return the names that a source needs: those that it names, and those that these need."""
    needs: dict[str, list[frozenset[str]]] = {}
    for paragraph in library:
        for name in paragraph.defines:
            needs.setdefault(name, []).append(paragraph.needs)
    needed, waiting = set[str](), set(named)
    while waiting:
        needed |= waiting
        waiting = {name for defined in waiting for names in needs.get(defined, ()) for name in names} - needed
    return needed


def _paragraphs(name: str, included: set[str]) -> list[Paragraph]:
    """Return the paragraphs of a header and, before them, of those that it includes.

    A header that is already in ``included`` yields no paragraphs. The headers that are read are
    added to ``included``.
    """
    if name in included:
        return []
    included.add(name)
    header = _header(name)
    before = [paragraph for other in header.includes for paragraph in _paragraphs(other, included)]
    return [*before, *header.paragraphs]


@cache
def _header(name: str) -> Header:
    return parsed((resources.files("mtagen") / "templates/cuda" / name).read_text(encoding="utf-8"))


def parsed(text: str) -> Header:
    """Return a header whose text is given."""
    lines = text.removeprefix("#pragma once\n").splitlines()
    includes = tuple(_included(line) for line in lines if line.startswith(_INCLUDE))
    paragraphs: list[Paragraph] = []
    introduced = frozenset[str]()  # by a comment before this paragraph
    for part in reversed(_split([line for line in lines if not line.startswith(_INCLUDE)])):
        if all(line.startswith("//") for line in part):
            defines, introduced = introduced, frozenset()
        else:
            defines = frozenset(name for line in part for name in _defined(line))
            introduced |= defines
        paragraphs.insert(0, Paragraph("\n".join(part), defines, frozenset(_names(part))))
    return Header(includes, tuple(paragraphs))


def _split(lines: Iterable[str]) -> list[list[str]]:
    """Return the paragraphs among lines: those between blank lines that are inside no braces."""
    paragraphs: list[list[str]] = [[]]
    depth = 0
    for line in lines:
        depth += line.count("{") - line.count("}")
        if line or depth:
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


def _defined(line: str) -> list[str]:
    """Return the names that a line of a header defines, if it begins a definition."""
    match line.partition(" ")[0]:  # nothing if the line is indented
        case "struct" | "using" | "#define":
            return [line.split()[1]]
        case "constexpr":
            return [part.split()[-1] for part in line.split(" = ")[:-1]]
        case "DEVICE":  # the arguments of a specialisation follow its name
            return [line.partition("(")[0].partition("<")[0].split()[-1]]
    return []


def _included(line: str) -> str:
    return line.removeprefix(_INCLUDE).removesuffix('"')


def _names(lines: Iterable[str]) -> set[str]:
    """Return the identifiers in lines, except those in comments."""
    code = " ".join(line.partition("//")[0] for line in lines)
    return set(code.translate(_SPACES).split())
