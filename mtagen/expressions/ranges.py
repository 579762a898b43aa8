"""Ranges of integer expressions, from the ranges of the places that they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import TypeAlias

import sympy
from sympy import Expr
from sympy.logic.boolalg import Boolean

from .language import ENTRY, HEAD, KEY, POSITION, Floor, Maximum, Minimum, Where

LARGEST_PLACE = 2**30  # positions and keys are less, and kernels count them in 32 bits
_LARGEST_ENTRY = 2**31  # of a parameter of integers, in 32 bits

Range: TypeAlias = tuple[float, float]  # the least and the greatest value
_ALL: Range = (-math.inf, math.inf)
_DISTANCE = sympy.Symbol("distance", integer=True)
_MONOTONE: dict[type[Expr], Callable[[float], float]] = {
    Floor: lambda x: math.floor(x) if math.isfinite(x) else x,
    sympy.exp: lambda x: math.exp(min(x, 700.0)),
    sympy.log: lambda x: math.log(x) if x > 0 else -math.inf,
    sympy.tanh: math.tanh,
}


def range_of(index: Expr, distances: Range) -> Range:
    """Return limits of an index, for all pairs of a query and a key that it sees.

    The limits hold, but may be wider than the range. Positions, keys, heads and batch entries are
    at least 0.

    Args:
        index: an integer expression in places.
        distances: the range of the query's position minus the key.
    """
    expr = index.xreplace({POSITION: KEY + _DISTANCE}).expand()
    if not expr.has(KEY):  # of the distance alone
        return _range(expr, distances)
    by_places, by_distance = _range(index, distances), _range(expr, distances)
    return max(by_places[0], by_distance[0]), min(by_places[1], by_distance[1])


def magnitude(expr: Expr) -> float:
    """Return a limit of the absolute values of an integer and of all integers that it is computed from."""
    if expr.is_number:
        return float(abs(expr))
    if expr.is_Symbol:
        return float(LARGEST_PLACE - 1)
    parts = [magnitude(part) for part in expr.args if isinstance(part, Expr)]
    if expr.is_Add:
        return sum(parts)
    if expr.is_Mul:
        return math.prod(max(1.0, part) for part in parts)
    if expr.is_Pow:
        return max(1.0, parts[0]) ** float(expr.exp) if expr.exp.is_Integer and expr.exp > 0 else math.inf
    if isinstance(expr, (Minimum, Maximum, Where)):
        return max(parts)
    if isinstance(expr, sympy.Mod):  # an entry itself is in 32 bits, whatever its sign
        number, divisor = expr.args
        is_computed = number.is_Add or number.is_Mul or number.is_Pow
        return max(parts[0] if is_computed else min(parts[0], _LARGEST_ENTRY - 1), float(divisor))
    if isinstance(expr, sympy.floor) and is_of_integers(expr):
        numerator, divisor = sympy.fraction(sympy.together(expr.args[0]))
        return magnitude(numerator) + float(divisor)
    return float(_LARGEST_ENTRY) if expr.is_integer and not expr.is_Function else math.inf


def is_of_integers(floor: Expr) -> bool:
    """Return whether a floor is that of an integer over a number, which integers can compute exactly."""
    numerator, divisor = sympy.fraction(sympy.together(floor.args[0]))
    return bool(numerator.is_integer and divisor.is_Integer)


def _range(expr: Expr, distances: Range) -> Range:
    if expr.is_number:
        return float(expr), float(expr)
    if expr in (POSITION, KEY, HEAD, ENTRY):
        return 0.0, math.inf
    if expr == _DISTANCE:
        return distances
    parts = [_range(part, distances) for part in expr.args if isinstance(part, Expr)]
    if isinstance(expr, Minimum):
        return min(low for low, _ in parts), min(high for _, high in parts)
    if isinstance(expr, Maximum):
        absolute = expr.args[0] == -expr.args[1]
        return max((0.0,) * absolute + tuple(low for low, _ in parts)), max(high for _, high in parts)
    if isinstance(expr, Where):
        holds = _holds(expr.args[0], distances)
        parts = parts if holds is None else parts[not holds :][:1]
        return min(low for low, _ in parts), max(high for _, high in parts)
    if type(expr) in _MONOTONE:
        function = _MONOTONE[type(expr)]
        return function(parts[0][0]), function(parts[0][1])
    if expr.is_Add:
        if divisor := _divisor_of_remainder(expr):
            return 0.0, divisor - 1.0
        return sum(low for low, _ in parts), sum(high for _, high in parts)
    if expr.is_Mul:
        result = parts[0]
        for part in parts[1:]:
            ends = [_times(x, y) for x, y in product(result, part)]
            result = min(ends), max(ends)
        return result
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        low, high = parts[0]
        ends = [_power(low, int(expr.exp)), _power(high, int(expr.exp))]
        least = 0.0 if int(expr.exp) % 2 == 0 and low < 0 < high else min(ends)
        return least, max(ends)
    return _ALL


def _divisor_of_remainder(expr: Expr) -> int | None:
    """Return the divisor of a sum that is the remainder ``x - n floor(x / n)`` of an integer x; None if it is none."""
    for term in expr.args:
        factor, quotient = term.as_coeff_Mul()
        if isinstance(quotient, sympy.floor) and factor.is_Integer and factor < 0:
            number = expr - term
            if number.is_integer and sympy.expand(number + factor * quotient.args[0]) == 0:
                return int(-factor)
    return None


def _holds(condition: Boolean, distances: Range) -> bool | None:
    """Return whether a condition holds for all distances of a range or for none; None if neither is known."""
    if isinstance(condition, (sympy.StrictGreaterThan, sympy.GreaterThan)):
        condition = condition.reversed
    if not isinstance(condition, (sympy.StrictLessThan, sympy.LessThan)):
        return None
    low, high = _range(condition.lhs - condition.rhs, distances)
    strict = isinstance(condition, sympy.StrictLessThan)
    if high < 0 or (high == 0 and not strict):
        return True
    return False if low > 0 or (low == 0 and strict) else None


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _power(x: float, exponent: int) -> float:
    try:
        return float(x**exponent)
    except OverflowError:
        return math.inf
