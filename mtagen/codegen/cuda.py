"""Render CUDA C++ sources from plans of fused passes and of strips' kernels.

It takes no decisions.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import jinja2

from ..planner.cuda.score import score_function
from ..planner.geometry.score import ScoreStage
from ..planner.geometry.sequence import SEQUENCE
from ..planner.kernel import Argument
from ..planner.plan import Plan
from ..planner.strip.kernels import PROGRAMS
from ..planner.strip.stages import PROBABILITY_SCALE, SCORE_SCALE
from ..version import __version__
from .cuda_masks import cuda_masks_of, hidden, visible
from .expressions import c_expression, c_place, c_view
from .host import allocate, codes, launch, options, together
from .library import linked_cuda
from .parameters import TileSums, differentiated, learned, tables
from .printers import c_code, python_code
from .templates import environment, spaced

WIDTH = 120  # columns of a line


def render(plan: Any) -> str:
    """Render the source of one kernel, ready for NVRTC.

    Args:
        plan: the plan of a fused pass or of a strip's kernel; ``plan.template`` names its template.
    """
    mask = ScoreStage.of(plan.spec).visible
    text = (
        _environment()
        .get_template(plan.template)
        .render(
            plan=plan,
            spec=plan.spec,
            mask=mask,
            score=score_function(plan.spec),
            view_address=partial(c_view, packed=plan.spec.packed),
            masks=cuda_masks_of(mask),
            hidden=partial(hidden, mask),
            visible=partial(visible, mask),
            sequence=SEQUENCE,
            version=__version__,
        )
    )
    return spaced(linked_cuda(text))


def host_name(plan: Plan) -> str:
    """Return the name of the module that launches a plan's CUDA kernels."""
    return f"mta_tile_{plan.suffix}"


def render_host(plan: Plan) -> str:
    """Render the Python module that launches a plan's CUDA kernels."""
    context = {"name": host_name(plan), "spec": plan.spec, "options": options(plan.spec), "target": plan.target}
    context |= {
        "score": score_function(plan.spec),
        "sums": TileSums(ScoreStage.of(plan.spec).sums, plan.spec.packed, "total_k" if plan.spec.packed else "n_k"),
        "log2e": math.log2(math.e),
        "tables": partial(tables, plan.spec),
        "learned": "".join(f", {name}" for name in learned(plan.spec)),
        "differentiated": ", ".join(differentiated(plan.spec)),
        "learned_gradients": "".join(f", d{name}" for name in differentiated(plan.spec)),
    }
    cuda = {role: source for tile_pass in plan.tile.values() for role, source in tile_pass.cuda.items()}
    return _environment().get_template("host.py.j2").render(**context, cuda=cuda, version=__version__)


def heads_host_name(plan: Plan) -> str:
    """Return the name of the module that launches the kernels of the lowering "heads"."""
    return f"mta_heads_{plan.suffix}"


def render_heads_host(plan: Plan) -> str:
    """Render the Python module that launches the kernels of the lowering "heads"."""
    forward = plan.heads["forward"]
    context = {"name": heads_host_name(plan), "spec": plan.spec, "target": plan.target, "plan": forward}
    return _environment().get_template("heads_host.py.j2").render(**context, cuda=forward.cuda, version=__version__)


@cache
def _environment() -> jinja2.Environment:
    templates = environment("cuda")
    templates.filters |= {"parameters": _parameters, "names": _names_of, "table": _table}
    templates.filters |= {
        "host": python_code,
        "c": c_code,
        "expression": c_expression,
        "place": c_place,
        "codes": codes,
    }
    templates.globals |= {"allocate": allocate, "launch": launch, "together": together} | {
        "asm_operands": _asm_operands,
        "asm_outputs": _asm_outputs,
    }
    # Constants of the kernels of rows
    templates.globals |= {
        "SCORE_SCALE": SCORE_SCALE,
        "PROBABILITY_SCALE": PROBABILITY_SCALE,
        "LOG2_PROBABILITY_SCALE": math.log2(PROBABILITY_SCALE),
        "PROGRAMS": PROGRAMS,
    }
    return templates


def _parameters(arguments: Sequence[Argument]) -> str:
    """Return the parameter list of a kernel, on lines of its own."""
    return _filled((argument.declaration for argument in arguments), 4)


def _names_of(arguments: Sequence[Argument]) -> str:
    """Return arguments by which a kernel hands on some of its parameters."""
    return ", ".join(argument.name for argument in arguments)


def _table(rows: Iterable[Sequence[Any]]) -> str:
    """Return the initialiser of an array of rows, on lines of its own."""
    return _filled([_braces(row) for row in rows], 6)


def _braces(value: Any) -> str:
    """Return an initialiser of nested numbers."""
    return f"{{{', '.join(map(_braces, value))}}}" if isinstance(value, Sequence) else str(value)


def _filled(items: Iterable[str], indent: int) -> str:
    """Return items, separated by commas, as indented lines. No item is broken."""
    whole, margin = (item.replace(" ", "\0") for item in items), " " * indent
    filled = textwrap.fill(", ".join(whole), WIDTH - 2, initial_indent=margin, subsequent_indent=margin)
    return filled.replace("\0", " ")


def _asm_operands(first: int, count: int) -> str:
    """Return lines of an asm statement: a vector of the operands from ``%first`` on, and a comma."""
    operands = ", ".join(f"%{i}" for i in range(first, first + count))
    lines = textwrap.wrap(f"{{ {operands} }},", WIDTH - 9)  # less the indentation, quotes and a space
    return "\n".join(f'      "{line} "' for line in lines)


def _asm_outputs(array: str, count: int) -> str:
    """Return lines of an asm statement that read and write every float of an array."""
    outputs = ", ".join(f'"+f"({array}[{i}])' for i in range(count))
    return textwrap.fill(outputs, WIDTH, initial_indent="      : ", subsequent_indent="        ")
