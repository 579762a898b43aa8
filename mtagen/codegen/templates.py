"""The Jinja environment for a folder of templates."""

from __future__ import annotations

import jinja2

from ..spec import DROPOUT_GROUP


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
    templates.globals["DROPOUT_GROUP"] = DROPOUT_GROUP
    return templates
