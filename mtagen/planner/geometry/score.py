"""The stage between scores and the softmax: which pairs of query and key are visible, and a function of scores."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache, cached_property

import sympy
from sympy import Add, Expr, Rational

from ...expressions import language
from ...spec import Spec
from .mask import Mask

# The parameters of the functions of a score, and their names in kernels: the score, the gradient of what it becomes,
# the position of its query, its key, and its head of queries.
SCORE, GRADIENT = sympy.symbols("score gradient", real=True)
POSITION, KEY, HEAD = sympy.symbols("position key head", integer=True)
# A kernel holds a score divided by this number, which may be known only at run time.
FACTOR = sympy.Symbol("factor", real=True, nonzero=True)


@dataclass(frozen=True)
class ScoreStage:
    """The mask and the function that apply to scores before the softmax.

    It is printed as functions, which templates call without asking what they are:
    ``visible(position, key)``, ``modify(score, position, key, head)`` and
    ``modify_backward(gradient, score, position, key, head)``. In CUDA the last two take
    ``factor`` after ``score``, because some kernels know their units only at run time.

    Attributes:
        visible: the keys that each query sees. Bounds of loops and edge tiles follow from it, too.
        modify: the function, an expression in ``SCORE``, ``POSITION``, ``KEY`` and ``HEAD``; the
            identity by default.
    """

    visible: Mask
    modify: Expr = SCORE

    @classmethod
    def of(cls, spec: Spec) -> ScoreStage:
        """Return what a request does with its scores."""
        return _stage(spec)

    @property
    def is_identity(self) -> bool:
        """Whether the softmax takes scores as they are."""
        return bool(self.modify == SCORE)

    @property
    def name(self) -> str:
        """The part of kernel names that tells stages apart."""
        digest = hashlib.sha256(str(self.modify).encode()).hexdigest()[:8]
        return "_".join(filter(None, [self.visible.name, "" if self.is_identity else f"logits{digest}"]))

    @cached_property
    def modify_backward(self) -> Expr:
        """The gradient of a score from the ``GRADIENT`` of what it becomes. It is linear in ``GRADIENT``.

        A gradient of 0 stays 0, because hidden scores have no gradient, and their slope may be
        infinite or NaN.
        """
        slope = sympy.diff(self.modify, SCORE)
        if slope.is_number:
            return GRADIENT * slope
        return language.Where(sympy.Ne(GRADIENT, 0), GRADIENT * slope, 0)

    def scaled(self, scale: Expr | float) -> ScoreStage:
        """Return the stage of scores that kernels hold times ``scale``."""
        exact = scale if isinstance(scale, Expr) else Rational(scale)
        terms = Add.make_args(self.modify.xreplace({SCORE: SCORE / exact}))
        of_score = [exact * term for term in terms if term.has(SCORE)]
        # The other terms stay together: differences of places must be taken before they are rounded.
        return replace(self, modify=Add(*of_score, exact * Add(*(term for term in terms if not term.has(SCORE)))))


@cache
def _stage(spec: Spec) -> ScoreStage:
    if spec.logits is None:
        return ScoreStage(Mask.of(spec))
    names = {language.SCORE: SCORE, language.POSITION: POSITION, language.KEY: KEY, language.HEAD: HEAD}
    return ScoreStage(Mask.of(spec), language.read("logits", spec.logits).xreplace(names))
