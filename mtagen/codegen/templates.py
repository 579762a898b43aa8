"""The Jinja environment for a folder of templates."""

from __future__ import annotations

import ast
from functools import cache
from importlib import resources

import jinja2

from ..planner.geometry.score import learned_views, views_of
from ..spec import DROPOUT_GROUP
from .host import SCHEDULING, cache_shapes_of, shapes_of


def environment(folder: str) -> jinja2.Environment:
    """Make an environment for source code: undefined names raise, blocks leave no lines, nothing is
    escaped.
    """
    templates = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("mtagen", f"templates/{name}") for name in (folder, "host")]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.globals |= {"DROPOUT_GROUP": DROPOUT_GROUP, "functions": functions, "shapes_of": shapes_of}
    templates.globals |= {"cache_shapes_of": cache_shapes_of, "SCHEDULING": SCHEDULING}
    templates.globals |= {"views_of": views_of, "learned_views": learned_views}
    return templates


@cache
def functions(file: str, *names: str) -> str:
    """Return the functions of a Python file of templates that have these names.

    Without names, return all that the file defines, without its imports.
    """
    source = (resources.files("mtagen") / "templates" / file).read_text(encoding="utf-8")
    lines = source.splitlines()
    parts = []
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name, decorator_list=decorators) if not names or name in names:
                first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            case ast.ClassDef() | ast.AnnAssign() if not names:
                first = node.lineno
            case _:
                continue
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts)


def spaced(text: str, definitions: tuple[str, ...] = ()) -> str:
    """Return a text with one blank line where it has some, two before a definition, and none at its
    ends.

    Args:
        text: source code.
        definitions: prefixes of the lines that begin a definition.
    """
    lines: list[str] = []
    blank = False
    for line in text.strip().splitlines():
        if line and blank:
            lines += [""] * (2 if line.startswith(definitions) else 1)
        if line:
            lines.append(line)
        blank = not line
    return "\n".join([*lines, ""])
