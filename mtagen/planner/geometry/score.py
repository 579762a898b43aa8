"""What happens to a score: the pairs of query and key that are visible, and the function of a visible score."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from sympy import Expr, Rational

from ...spec import Spec
from .mask import Mask

# The parameters of the functions of a score, and their names in kernels.
SCORE, GRADIENT = sympy.symbols("score gradient", real=True)


@dataclass(frozen=True)
class ScoreStage:
    """What happens to a score before the softmax, wherever a kernel holds one.

    Each language prints it as functions that templates call without asking what they are:
    ``visible(position, key)``, ``modify(score, position, key, head)``, and
    ``modify_backward(gradient, score, position, key, head)``.

    Attributes:
        visible: the keys that each query sees. Bounds of loops and edge tiles follow from it, too.
        modify: the function, an expression in ``SCORE``; the identity by default.
    """

    visible: Mask
    modify: Expr = SCORE

    @classmethod
    def of(cls, spec: Spec) -> ScoreStage:
        """Return what a request does with its scores."""
        return cls(Mask.of(spec))

    @property
    def modify_backward(self) -> Expr:
        """The gradient of a score from the ``GRADIENT`` of what it becomes."""
        return GRADIENT * sympy.diff(self.modify, SCORE)

    def scaled(self, factor: float) -> ScoreStage:
        """Return the stage of scores that kernels hold times ``factor``."""
        exact = Rational(factor)
        return replace(self, modify=exact * self.modify.subs(SCORE, SCORE / exact))
