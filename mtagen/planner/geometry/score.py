"""What happens to a score: the pairs of query and key that are visible, and the function of a visible score."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from sympy import Expr, Rational

from ...spec import Spec
from .mask import Mask

SCORE = sympy.Symbol("score", real=True)  # the parameter of a score's function, and its name in kernels


@dataclass(frozen=True)
class ScoreStage:
    """What happens to a score before the softmax, wherever a kernel holds one.

    Each language prints it as two functions that templates call without asking what they are:
    ``visible(position, key)`` and ``modify(score, position, key, head)``.

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

    def scaled(self, factor: float) -> ScoreStage:
        """Return the stage of scores that kernels hold times ``factor``."""
        exact = Rational(factor)
        return replace(self, modify=exact * self.modify.subs(SCORE, SCORE / exact))
