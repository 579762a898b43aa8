"""The Jinja environment for a folder of templates."""

from __future__ import annotations

from importlib import resources

import jinja2

from ..spec import DROPOUT_GROUP

_HOST = resources.files("mtagen") / "templates/host"


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
    templates.globals |= {"DROPOUT_GROUP": DROPOUT_GROUP, "functions_of": functions_of}
    return templates


def functions_of(name: str) -> str:
    """Return what a Python file of host functions defines, without its imports.

    The module that takes the functions has imports of its own.
    """
    source = (_HOST / name).read_text(encoding="utf-8")
    _, _, definitions = source.partition("\n\n\n")
    return definitions
