"""The condition that kernels check for each pair of a query and a key, where first and last keys do not say all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy
from sympy import Symbol
from sympy.logic.boolalg import Boolean

from ...expressions import language
from ...expressions.bounds import seen_by
from ...expressions.parameters import read_parameters
from ...spec import Spec
from .score import KEY, POSITION, TOKENS, Entry, View


@dataclass(frozen=True)
class PairCondition:
    """A condition in ``POSITION``, ``KEY`` and entries of parameters of integers.

    Attributes:
        expr: the condition; true if kernels check none.
        views: what it reads of parameters, in their order.
    """

    expr: Boolean = sympy.true
    views: tuple[View, ...] = ()

    @classmethod
    def of(cls, spec: Spec) -> PairCondition:
        """Return the condition of a request."""
        return _condition(spec)

    @property
    def is_checked(self) -> bool:
        """Whether there is a condition."""
        return bool(self.expr != sympy.true)

    @property
    def reads_tokens(self) -> bool:
        """Whether a parameter has a number for each token of a sequence, or for blocks of tokens."""
        return any(view.token_axes or view.parameter.blocks for view in self.views)

    @property
    def named(self) -> list[tuple[int, str]]:
        """What kernels know of a query that the condition names besides places, with its number there."""
        names = [TOKENS.name] * self.reads_tokens + [view.symbol.name for view in self.views]
        return [*enumerate(names, start=2)]


@cache
def _condition(spec: Spec) -> PairCondition:
    checked = seen_by(spec.visible, spec.parameters).checked
    parameters = read_parameters(spec.parameters)
    views = {
        view.parameter.name: view for view in map(View, parameters) if view.parameter.name in spec.checked_parameters
    }
    entries = {}
    for load in checked.atoms(language.Load):
        view = views[load.parameter]
        entries[load] = Entry(Symbol(view.symbol.name, integer=True), view.offset(load.indices))
    names = {language.POSITION: POSITION, language.KEY: KEY}
    return PairCondition(checked.xreplace(entries).xreplace(names), tuple(views.values()))
