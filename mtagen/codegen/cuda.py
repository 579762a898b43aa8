"""Fused pass plan -> CUDA C++ source: fills in the templates, decides nothing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib import resources
from typing import Any

import jinja2

from ..planner.geometry.affine import N_K, Size
from ..planner.geometry.mask import Mask
from ..planner.geometry.sequence import SEQUENCE
from ..planner.kernel import Argument
from ..planner.plan import Plan
from ..version import __version__
from .host import allocate, codes, launch, options, together
from .printers import Source, c_code, python_code
from .templates import environment

# At the left margin: a comment, a template's parameters, a function to its end.
FUNCTION = re.compile(
    r"(?:^//.*\n)*(?:^template .*\n)?^DEVICE .*?(?P<name>\w+)(?:<\w+>)?\((?:.*[;}]\n|[\s\S]*?^}\n)", re.MULTILINE
)
# The same of a constant.
_CONSTANT = re.compile(r"(?:^//.*\n)*^constexpr \w+ (?P<name>\w+) = [^,;]*;.*\n", re.MULTILINE)
WIDTH = 120  # of a line
_INCLUDE = re.compile(r'^#include "(?P<name>\w+\.cuh)"\n', re.MULTILINE)


def render(plan: Any) -> str:
    """The source of one pass, ready for NVRTC.

    Args:
        plan: a fused pass plan; ``plan.template`` names its template.
    """
    mask = Mask.of(plan.spec)
    text = (
        _environment()
        .get_template(plan.template)
        .render(
            plan=plan,
            spec=plan.spec,
            mask=mask,
            hidden=partial(_hidden, mask),
            sequence=SEQUENCE,
            version=__version__,
        )
    )
    text = _without_unused(_with_headers(text, set()))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _with_headers(source: str, included: set[str]) -> str:
    """Put each of mtagen's own headers in the place where it is first included: the source stands alone."""

    def content(match: re.Match[str]) -> str:
        name = match["name"]
        if name in included:
            return ""
        included.add(name)
        header = (resources.files("mtagen") / "templates/cuda" / name).read_text(encoding="utf-8")
        return _with_headers(f"\n{header.removeprefix('#pragma once')}\n", included)

    return _INCLUDE.sub(content, source)


def _without_unused(source: str) -> str:
    """Drop functions and constants that nothing needs, and the comment before each: headers serve all kernels."""
    definitions = [*FUNCTION.finditer(source), *_CONSTANT.finditer(source)]
    needs: dict[str, set[str]] = {}
    others = source
    for definition in definitions:
        others = others.replace(definition[0], "")
        needs.setdefault(definition["name"], set()).update(_names(definition[0]))
    needed, new = set[str](), _names(others)
    while new:
        needed |= new
        new = set[str]().union(*(needs.get(name, ()) for name in new)) - needed
    for definition in definitions:
        if definition["name"] not in needed:
            source = source.replace(definition[0], "")
    return source


def _names(source: str) -> set[str]:
    """The words of source, without those of comments."""
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", source)))


def host_name(plan: Plan) -> str:
    """Name of the module that launches a plan's CUDA kernels."""
    return f"mta_tile_{plan.suffix}"


def render_host(plan: Plan) -> str:
    """The Python module that launches a plan's CUDA kernels."""
    context = {"name": host_name(plan), "spec": plan.spec, "options": options(plan.spec), "target": plan.target}
    cuda = {role: source for one in plan.tile.values() for role, source in one.cuda.items()}
    return _environment().get_template("host.py.j2").render(**context, cuda=cuda, version=__version__)


@cache
def _environment() -> jinja2.Environment:
    templates = environment("cuda")
    templates.filters |= {"parameters": _parameters, "table": _table, "host": python_code, "c": c_code, "codes": codes}
    templates.globals |= {"allocate": allocate, "launch": launch, "together": together} | {
        "asm_operands": _asm_operands,
        "asm_outputs": _asm_outputs,
    }
    return templates


def _parameters(arguments: Sequence[Argument]) -> str:
    """The parameter list of a kernel, on lines of its own."""
    return _filled((argument.declaration for argument in arguments), 4)


def _table(rows: Iterable[Sequence[Any]]) -> str:
    """The initialiser of an array of rows, in lines of its own."""
    return _filled([_braces(row) for row in rows], 6)


def _braces(value: Any) -> str:
    """An initialiser of nested numbers."""
    return f"{{{', '.join(map(_braces, value))}}}" if isinstance(value, Sequence) else str(value)


def _filled(items: Iterable[str], indent: int) -> str:
    """Items between commas in indented lines, none broken across them."""
    whole, margin = (item.replace(" ", "\0") for item in items), " " * indent
    filled = textwrap.fill(", ".join(whole), WIDTH - 2, initial_indent=margin, subsequent_indent=margin)
    return filled.replace("\0", " ")


def _hidden(mask: Mask, position: str | tuple[str, str], key: str | tuple[str, str], *, n_k: Size | None = N_K) -> str:
    """The condition that a key is hidden from the query at a position, or is past the keys (see :meth:`Mask.hidden`).

    Of tiles, given by the first and the last position or key: that some key is hidden from some query.
    """
    positions, keys = ([*map(Source, (x, x) if isinstance(x, str) else x)] for x in (position, key))
    comparisons = mask.hidden((positions[0], positions[1]), (keys[0], keys[1]), n_k=n_k)
    return " || ".join(f"{c_code(left)} {operator} {c_code(right)}" for left, operator, right in comparisons)


def _asm_operands(first: int, count: int) -> str:
    """Lines of an asm statement: a vector of operands ``%first`` and on, and the comma after it."""
    operands = ", ".join(f"%{i}" for i in range(first, first + count))
    lines = textwrap.wrap(f"{{ {operands} }},", WIDTH - 9)  # less the indentation, quotes and a space
    return "\n".join(f'      "{line} "' for line in lines)


def _asm_outputs(array: str, count: int) -> str:
    """Lines of an asm statement: every float of an array, read and written."""
    outputs = ", ".join(f'"+f"({array}[{i}])' for i in range(count))
    return textwrap.fill(outputs, WIDTH, initial_indent="      : ", subsequent_indent="        ")
