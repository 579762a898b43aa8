"""Exact ranges and roots of affine integer expressions: the arithmetic beneath stencils and tile bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import sympy
from sympy import Expr, Symbol

Size: TypeAlias = int | Expr
Interval: TypeAlias = tuple[Expr, Expr]  # both ends included

N_Q, N_K = sympy.symbols("n_q n_k", integer=True, nonnegative=True)  # queries and keys of a sequence


def interval_over(affine: Expr, box: Mapping[Symbol, Interval]) -> Interval:
    """Exact minimum and maximum of ``affine`` when each symbol of ``box`` runs over its interval.

    An affine function takes its extrema at corners: each symbol sits at the end its slope points to.

    Raises:
        ValueError: the sign of a slope is not known.
    """
    low = high = sympy.sympify(affine)
    for symbol, (first, last) in box.items():
        slope = sympy.diff(affine, symbol)
        if slope.is_nonnegative:
            low, high = low.subs(symbol, first), high.subs(symbol, last)
        elif slope.is_nonpositive:
            low, high = low.subs(symbol, last), high.subs(symbol, first)
        else:
            raise ValueError(f"the slope of {affine} in {symbol} has no known sign")
    return low, high


def root(affine: Expr, symbol: Symbol) -> Expr:
    """The one value of ``symbol`` at which ``affine`` is zero."""
    (solution,) = sympy.solve(affine, symbol)
    return solution
