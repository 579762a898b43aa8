"""The first and the last key that each query sees, as expressions from which a kernel computes the tables of a mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sympy import Expr, Symbol

from ...expressions import language
from ...expressions.bounds import Gap, seen_by
from ...expressions.language import Maximum
from ...expressions.parameters import read_parameters
from ...spec import Spec
from .score import POSITION, Entry, View


@dataclass(frozen=True)
class Limits:
    """Integers in ``POSITION`` and entries of parameters.

    Attributes:
        firsts, lasts: a query sees the keys from the greatest of ``firsts`` to the least of ``lasts``, none if that is
            before; key 0 and the last key of the sequence are bounds, too.
        gaps: keys between two runs, which kernels may skip. A gap that ends before it begins is none.
        views: what the expressions read of parameters, in their order.
    """

    firsts: tuple[Expr, ...]
    lasts: tuple[Expr, ...]
    gaps: tuple[Gap, ...]
    views: tuple[View, ...]

    @classmethod
    def of(cls, spec: Spec) -> Limits:
        """Return the limits of a request whose mask is no window."""
        return _limits(spec)


@cache
def _limits(spec: Spec) -> Limits:
    seen = seen_by(spec.visible, spec.parameters)
    parameters = {parameter.name: parameter for parameter in read_parameters(spec.parameters)}
    views = {name: View(parameters[name]) for name in spec.table_parameters}

    def printable(bound: Expr) -> Expr:
        entries = {
            load: Entry(
                Symbol(views[load.parameter].symbol.name, integer=True), views[load.parameter].offset(load.indices)
            )
            for load in bound.atoms(language.Load)
        }
        return bound.xreplace(entries).xreplace({language.POSITION: POSITION})

    firsts = [*map(printable, seen.run.firsts), *([] if spec.left is None else [POSITION - spec.left])]
    lasts = [*map(printable, seen.run.lasts), *([] if spec.right is None else [POSITION + spec.right])]
    gaps = seen.gaps if spec.has_gap else ()
    return Limits(
        tuple(firsts),
        tuple(lasts),
        tuple(Gap(Maximum(printable(gap.first), 0), Maximum(printable(gap.last), -1)) for gap in gaps),
        tuple(views.values()),
    )
