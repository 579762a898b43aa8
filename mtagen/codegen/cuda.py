"""Fused pass plan -> CUDA C++ source: fills in the templates, decides nothing."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jinja2

from ..version import __version__
from .templates import environment

# At the left margin: a comment, a template's parameters, a function to its end.
_FUNCTION = re.compile(
    r"(?:^//.*\n)*(?:^template .*\n)?^DEVICE .*?(?P<name>\w+)(?:<\w+>)?\((?:.*[;}]\n|[\s\S]*?^}\n)", re.MULTILINE
)


def render(plan: Any) -> str:
    """The source of one pass, ready for NVRTC.

    Args:
        plan: a fused pass plan; ``plan.template`` names its template.
    """
    text = _environment().get_template(plan.template).render(plan=plan, spec=plan.spec, version=__version__)
    text = _without_unused(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _without_unused(source: str) -> str:
    """Drop functions that nothing mentions, and the comment before each: collections of them serve all kernels."""
    functions = list(_FUNCTION.finditer(source))
    for name in dict.fromkeys(function["name"] for function in functions):
        others = source
        for function in functions:
            others = others.replace(function[0], "") if function["name"] == name else others
        if not re.search(rf"\b{name}\b", others):
            return _without_unused(others)
    return source


@cache
def _environment() -> jinja2.Environment:
    templates = environment("cuda")
    templates.globals |= {"asm_operands": _asm_operands, "asm_outputs": _asm_outputs}
    return templates


def _asm_operands(first: int, count: int) -> str:
    """Operands ``%first`` and on of an asm statement."""
    return ", ".join(f"%{i}" for i in range(first, first + count))


def _asm_outputs(array: str, count: int) -> str:
    """Every float of an array, read and written by an asm statement."""
    return ", ".join(f'"+f"({array}[{i}])' for i in range(count))
