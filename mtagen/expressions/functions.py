"""A function of scores with its derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import sympy
from sympy import Expr

from .language import SCORE, Load, Where, read
from .parameters import read_parameters

GRADIENT = sympy.Symbol("gradient", real=True)


@dataclass(frozen=True)
class ScoreExpression:
    """A function of scores, an expression of :mod:`.language`, and what its backward pass computes.

    Gradients are linear in :data:`GRADIENT`, the gradient of the function's value. Where that is 0
    they are 0, because hidden scores have no gradient, and their slope may be infinite or NaN.

    Attributes:
        expr: the value.
    """

    expr: Expr

    @cached_property
    def backward(self) -> Expr:
        """The gradient of the score."""
        return _times_gradient(sympy.diff(self.expr, SCORE))

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The entries of parameters that the value reads, in a fixed order."""
        return tuple(sorted(self.expr.atoms(Load), key=sympy.default_sort_key))

    def load_backward(self, load: Load) -> Expr:
        """Return the gradient of an entry of a parameter, of one score."""
        entry = sympy.Dummy(real=True)
        return _times_gradient(self.expr.xreplace({load: entry}).diff(entry).xreplace({entry: load}))


@cache
def functions_of(
    expressions: tuple[tuple[str, str], ...], parameters: tuple[tuple[str, str], ...]
) -> dict[str, ScoreExpression]:
    """Return functions of scores by the names of their options.

    Args:
        expressions: the names and texts, ``Spec.expressions``.
        parameters: the parameters that they read, as in ``Spec``.
    """
    known = read_parameters(parameters)
    return {name: ScoreExpression(read(name, text, known)) for name, text in expressions}


def _times_gradient(slope: Expr) -> Expr:
    if slope.is_number:
        return GRADIENT * slope
    return Where(sympy.Ne(GRADIENT, 0), GRADIENT * slope, 0)
