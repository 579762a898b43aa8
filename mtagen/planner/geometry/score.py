"""The stage between scores and the softmax: which pairs of query and key are visible, and a function of scores."""

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
    """The mask and the function that apply to scores before the softmax.

    It is printed as functions, which templates call without asking what they are:
    ``visible(position, key)`` and ``modify(score, position, key, head)``, and in Triton
    ``modify_backward(gradient, score, position, key, head)``. CUDA's kernels have no
    ``modify_backward``, and those of "tile" no ``modify``: they hold the identity only.

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
