"""The places of expressions in the pipeline: canonical texts of a request's expressions."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, explain
from .language import canonical, composed, names_in, text_of
from .parameters import Parameter, read_parameters

if TYPE_CHECKING:
    from ..spec import Spec


def normalised(spec: Spec) -> dict[str, Any]:
    """Return the expressions and parameters of a request in canonical form, by field.

    Without a convolution ``scores`` is a function of what ``convolved`` takes, and without a
    mixture ``convolved`` is one of what ``logits`` takes: they are joined.

    Raises:
        SpecError: an expression is not in the language, an index may leave a parameter, or a
            parameter is not read.
    """
    parameters = read_parameters(spec.parameters)
    least = -math.inf if spec.right is None else -spec.right
    most = math.inf if spec.left is None else spec.left
    # With the mask of outputs, scores count that up to cq - 1 later rows see.
    of_scores = least - (spec.cq - 1 if spec.mask == "output" else 0), most
    ranges = {"scores": of_scores, "convolved": (least, most), "logits": (least, most)}
    scores, convolved, logits = (
        canonical(name, getattr(spec, name), parameters, distances) for name, distances in ranges.items()
    )
    read = {name for text in (scores, convolved, logits) if text for name in names_in(text, parameters)}
    if unread := [parameter.name for parameter in parameters if parameter.name not in read]:
        raise SpecError(explain("parameters", unread, "are read by no expression", "parameters of the expressions"))
    if spec.kernel is None:
        scores, convolved = None, composed(convolved, scores, parameters)
    if spec.mixed_heads is None:
        convolved, logits = None, composed(logits, convolved, parameters)
    pairs = tuple((parameter.name, parameter.text) for parameter in parameters)
    return {"scores": scores, "convolved": convolved, "logits": logits, "parameters": pairs}


def axes_in(expressions: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the axes of parameters, as the option ``parameters`` takes them, from how expressions index them.

    An axis that is indexed by b, h, i or j counts these. Another axis is one of a table.

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
        for node in ast.walk(ast.parse(text_of(option, given, tables).strip(), mode="eval")):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in axes:
                indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                for number, index in enumerate(indices[: len(axes[node.value.id])]):
                    if isinstance(index, ast.Name) and index.id in ("b", "h", "i", "j"):
                        axes[node.value.id][number] = index.id
    return {name: ",".join(each) for name, each in axes.items()}
