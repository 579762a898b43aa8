"""Exact ranges and roots of affine integer expressions, from which stencils and loop bounds follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import sympy
from sympy import Expr, Symbol

Size: TypeAlias = int | Expr
Interval: TypeAlias = tuple[Expr, Expr]  # both ends included

N_Q, N_K = sympy.symbols("n_q n_k", integer=True, nonnegative=True)  # queries and keys of a sequence


def interval_over(affine: Expr, box: Mapping[Symbol, Interval]) -> Interval:
    """Return the exact minimum and maximum of ``affine`` when each symbol of ``box`` is in its
    interval.

    An affine function has its extrema at corners of the box, which the signs of its slopes tell.

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
    """Return the only value of ``symbol`` at which ``affine`` is zero."""
    (solution,) = sympy.solve(affine, symbol)
    return solution
