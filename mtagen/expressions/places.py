"""The places of expressions in the pipeline: canonical texts of a request's expressions."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import SpecError, explain
from .given import canonical, text_of
from .language import composed, is_factor, names_in
from .parameters import Parameter, read_parameters

# The index of a block of tokens, as users and as canonical texts write it
_BLOCKS = re.compile(r"(floor\()?(?P<token>[ij])(?(1)/|//)(?P<size>[0-9]+)(?(1)\))")


def normalised(
    expressions: Mapping[str, Any],
    parameters: Any,
    distances: tuple[int | None, int | None, int],
    *,
    convolves: bool,
    mixes: bool,
    read_by_mask: Collection[str],
) -> dict[str, Any]:
    """Return the expressions and parameters of a request in canonical form, by field.

    Without a convolution ``scores`` acts as ``convolved``, and without mixing ``convolved`` acts as
    ``logits``. A factor of the head acts alike before and after a convolution, which is linear. Two
    expressions at one place are composed.

    Args:
        expressions: ``scores``, ``convolved`` and ``logits``, as they were given.
        parameters: as they were given.
        distances: how many keys before and after its own position a query sees, None for all; and how
            many later rows count a score that its own row does not see.
        convolves: whether there is a convolution before the softmax.
        mixes: whether heads are mixed before the softmax.
        read_by_mask: names of the parameters that the mask reads.

    Raises:
        SpecError: an expression is not in the language, an index may leave a parameter, or a
            parameter is read by nothing, or by both the mask and an expression.
    """
    known, (left, right, later) = read_parameters(parameters), distances
    least, most = -math.inf if right is None else -right, math.inf if left is None else left
    ranges = {"scores": (least - later, most), "convolved": (least, most), "logits": (least, most)}
    scores, convolved, logits = (canonical(name, expressions[name], known, of) for name, of in ranges.items())
    read = {name for text in (scores, convolved, logits) if text for name in names_in(text, known)}
    if unread := [parameter.name for parameter in known if parameter.name not in {*read, *read_by_mask}]:
        raise SpecError(explain("parameters", unread, "are read by no expression", "parameters of the expressions"))
    if blocks := [x for x in known if x.blocks and x.name in read]:
        rule = "counts blocks of tokens, and an expression reads it"
        raise SpecError(explain(f"parameters[{blocks[0].name!r}]", blocks[0].text, rule, "such axes for visible only"))
    if shared := sorted(read.intersection(read_by_mask)):
        rule = "are read by visible, as integers, and by an expression, as real numbers"
        raise SpecError(explain("parameters", shared, rule, "a parameter for each"))
    if not convolves or is_factor(scores, known):
        scores, convolved = None, composed("convolved", convolved, scores, known)
    if not mixes:
        convolved, logits = None, composed("logits", logits, convolved, known)
    pairs = tuple((parameter.name, parameter.text) for parameter in known)
    return {"scores": scores, "convolved": convolved, "logits": logits, "parameters": pairs}


def axes_in(expressions: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the axes of parameters, as the option ``parameters`` takes them, from how expressions index them.

    An axis that is indexed by b, h, i or j counts these, and one that is indexed by ``i // 64`` or ``j // 64`` blocks
    of 64 tokens. Another axis is one of a table.

    Args:
        expressions: texts, functions or None, by the name of the option.
        shapes: the shape of each parameter.

    Raises:
        SpecError: an expression is no text and no function, or is not in the language.
    """
    tables = [Parameter(name, (*shape,)) for name, shape in shapes.items()]
    axes = {name: [*map(str, shape)] for name, shape in shapes.items()}
    for option, given in expressions.items():
        if given is None:
            continue
        for node in ast.walk(
            ast.parse(text_of(option, given, tables, has_integers=option == "visible").strip(), mode="eval")
        ):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in axes:
                indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                for number, index in enumerate(indices[: len(axes[node.value.id])]):
                    text = ast.unparse(index).replace(" ", "")
                    if blocks := _BLOCKS.fullmatch(text):
                        axes[node.value.id][number] = f"{blocks['token']}//{blocks['size']}"
                    elif text in ("b", "h", "i", "j"):
                        axes[node.value.id][number] = text
    return {name: ",".join(each) for name, each in axes.items()}
