"""The option ``visible``: conditions on keys, read as the first and the last key that a query sees.

A condition that a run of keys meets, without gaps, is a pair of bounds. Kernels know masks by
these bounds alone: they take both for each query from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import repeat
from typing import Any, NamedTuple

import sympy
from sympy import Expr
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from ..errors import SpecError, explain
from .language import (
    HEAD,
    KEY,
    POSITION,
    SCORE,
    Floor,
    Function,
    Load,
    Maximum,
    Minimum,
    read_condition,
    text_of,
    write,
)
from .parameters import Parameter, read_parameters

LARGEST = 2**30  # a window has fewer keys on a side; kernels count keys in 32 bits
_LEGAL = "conditions on j that a run of keys meets, such as (j <= i) | (j < prefix[b]) or i // 64 == j // 64"


class Run(NamedTuple):
    """The keys from the greatest of some bounds to the least of others, as expressions of the query.

    Attributes:
        firsts: no key before one of these is seen.
        lasts: no key after one of these is seen.
    """

    firsts: tuple[Expr, ...] = ()
    lasts: tuple[Expr, ...] = ()

    @property
    def first(self) -> Expr | None:
        """The first key, or None for no bound."""
        return reduce(Maximum, self.firsts) if self.firsts else None

    @property
    def last(self) -> Expr | None:
        """The last key, or None for no bound."""
        return reduce(Minimum, self.lasts) if self.lasts else None

    @property
    def condition(self) -> Boolean:
        """The condition that a key is in the run."""
        firsts, lasts = (map(sympy.GreaterThan, repeat(KEY), self.firsts), map(sympy.LessThan, repeat(KEY), self.lasts))
        return sympy.And(*firsts, *lasts)


class Visible(NamedTuple):
    """A mask in canonical form.

    Attributes:
        text: the condition, or None if the window says the same.
        left, right: how many keys before and after its own position a query sees at most; None is no
            limit.
        parameters: the parameters that the condition reads.
    """

    text: str | None
    left: int | None
    right: int | None
    parameters: frozenset[str] = frozenset()


@cache
def bounds_of(text: str | None, parameters: tuple[tuple[str, str], ...]) -> tuple[Expr | None, Expr | None]:
    """Return the first and the last key that a query sees by the fields of a spec; None for no bound."""
    run = Run() if text is None else run_of(text, read_parameters(parameters))
    return run.first, run.last


def run_of(text: str, parameters: Sequence[Parameter] = ()) -> Run:
    """Return the keys that a query sees by a canonical text.

    Raises:
        SpecError: the text is not in the language, or not a run of keys.
    """
    return _Reader(text).run(read_condition("visible", text, parameters))


def parameters_in(text: str, parameters: Any) -> frozenset[str]:
    """Return the names of the parameters that a canonical text reads, of those of a spec."""
    return _parameters_of(run_of(text, read_parameters(parameters)))


def normalised_visible(given: str | Function | None, parameters: Any, left: int | None, right: int | None) -> Visible:
    """Return the mask of a window and a condition.

    Bounds that are a distance from the query's position join the window, and bounds that the window
    implies are left out. The window is the smallest that contains the mask for all values of
    parameters, if there is one.

    Args:
        given: the option ``visible``.
        parameters: the option ``parameters``.
        left, right: the window; None is no limit.

    Raises:
        SpecError: the condition is not in the language, not a run of keys, or changes nothing.
    """
    if given is None:
        return Visible(None, left, right)
    known = read_parameters(parameters)
    text = text_of("visible", given, known, has_integers=True)
    firsts, lasts = run_of(text, known)
    before = [-_range_from_position(first) for first in firsts]
    after = [_range_from_position(last) for last in lasts]
    # The limits of the window: keys that every query's bounds leave out are hidden by the window, too.
    left = _least([left, *(max(0, span.high) for span in before)])
    right = _least([right, *(max(0, span.high) for span in after)])
    kept = Run(
        tuple(first for first, span in zip(firsts, before, strict=True) if left is None or span.low < left),
        tuple(last for last, span in zip(lasts, after, strict=True) if right is None or span.low < right),
    )
    if unread := sorted(_parameters_of(Run(firsts, lasts)) - _parameters_of(kept)):
        rule = (
            f"{', '.join(unread)} changes nothing, because causal, window or another part of the condition hides more"
        )
        raise SpecError(explain("visible", text, rule, "a condition without it, or a wider mask, such as causal=False"))
    if kept == Run():
        return Visible(None, left, right)
    return Visible(write(kept.condition), left, right, _parameters_of(kept))


def _parameters_of(run: Run) -> frozenset[str]:
    return frozenset(load.parameter for bounds in run for bound in bounds for load in bound.atoms(Load))


class _Span(NamedTuple):
    """Limits of a difference of places."""

    low: float
    high: float

    def __neg__(self) -> _Span:
        return _Span(-self.high, -self.low)


def _least(limits: Sequence[float | None]) -> int | None:
    """Return the least of some limits; None and what no window has are no limit."""
    least = min((limit for limit in limits if limit is not None), default=math.inf)
    return None if least >= LARGEST else int(least)


def _range_from_position(bound: Expr) -> _Span:
    """Return limits of a bound less the query's position. They hold, but may be wider than the range."""
    if isinstance(bound, (Minimum, Maximum)):
        spans = [_range_from_position(part) for part in bound.args]
        extremum: Callable[..., float] = min if isinstance(bound, Minimum) else max
        return _Span(extremum(span.low for span in spans), extremum(span.high for span in spans))
    remainders: dict[Expr, int] = {}

    def divided(floor: Expr) -> Expr:
        """Return the floor of a quotient as its numerator less a remainder, over the divisor."""
        numerator, divisor = sympy.fraction(sympy.together(floor.args[0]))
        remainder = sympy.Dummy(integer=True)
        remainders[remainder] = int(divisor) - 1
        return (numerator - remainder) / divisor

    whole = [floor for floor in bound.atoms(Floor) if _is_of_integers(floor)]
    difference = (bound.xreplace({floor: divided(floor) for floor in whole}) - POSITION).expand()
    low, high = 0.0, 0.0
    for term in sympy.Add.make_args(difference):
        factor, symbol = term.as_coeff_Mul()
        if symbol == 1:
            ends = [float(factor)] * 2
        elif symbol in remainders:
            ends = [0.0, float(factor) * remainders[symbol]]
        else:
            ends = [-math.inf, math.inf]
        low, high = low + min(ends), high + max(ends)
    return _Span(low, high)


def _is_of_integers(floor: Expr) -> bool:
    numerator, divisor = sympy.fraction(sympy.together(floor.args[0]))
    return bool(numerator.is_integer and divisor.is_Integer)


class _Reader:
    """Reads a condition as a run of keys."""

    def __init__(self, text: str) -> None:
        self._text = text

    def run(self, condition: Boolean) -> Run:
        """Return the run of keys that meet a condition."""
        if condition.free_symbols & {SCORE, HEAD}:
            rule, legal = "a mask is the same for all scores and heads", "conditions in i, j, b and parameters"
            raise SpecError(explain("visible", self._text, rule, legal))
        if condition == sympy.true:
            return Run()
        if condition == sympy.false:
            raise SpecError(explain("visible", self._text, "no query sees a key", _LEGAL))
        if isinstance(condition, sympy.And):
            return _intersection([self.run(part) for part in _in_order(condition)])
        if isinstance(condition, sympy.Or):
            return reduce(self._union, [self.run(part) for part in _in_order(condition)])
        if not isinstance(condition, Relational):
            raise self._no_bound(condition)
        below, divisor = sympy.fraction(sympy.together(condition.lhs - condition.rhs))
        if not (below.is_integer and divisor.is_Integer):
            raise self._no_bound(condition)
        above = -below
        match condition:
            case sympy.StrictLessThan():
                return self._where_not_positive(below + 1, condition)
            case sympy.LessThan():
                return self._where_not_positive(below, condition)
            case sympy.StrictGreaterThan():
                return self._where_not_positive(above + 1, condition)
            case sympy.GreaterThan():
                return self._where_not_positive(above, condition)
            case sympy.Eq():
                return _intersection([self._where_not_positive(side, condition) for side in (below, above)])
        raise self._no_bound(condition)

    def _where_not_positive(self, expr: Expr, condition: Expr) -> Run:
        """Return the run of keys at which an integer is at most 0.

        The integer is a sum of which one term depends on the key: the key itself, a quotient or an
        extremum.
        """
        terms = sympy.Add.make_args(expr.expand())
        of_key = [term for term in terms if term.has(KEY)]
        if len(of_key) != 1:
            raise self._no_bound(condition)
        factor, part = of_key[0].as_coeff_Mul()
        rest = sympy.Add(*(term for term in terms if not term.has(KEY)))
        if not factor.is_Integer:
            raise self._no_bound(condition)
        if factor > 0:
            return self._up_to(part, Floor(-rest / factor), condition)
        return self._from(part, -Floor(rest / factor), condition)

    def _up_to(self, part: Expr, limit: Expr, condition: Expr) -> Run:
        """Return the run of keys at which a part is at most a limit."""
        if part == KEY:
            return Run(lasts=(self._checked(limit, condition),))
        if isinstance(part, Floor) and _is_of_integers(part):
            numerator, divisor = sympy.fraction(sympy.together(part.args[0]))
            return self._where_not_positive(numerator - divisor * limit - divisor + 1, condition)
        if isinstance(part, (Minimum, Maximum)):
            runs = [self._where_not_positive(each - limit, condition) for each in part.args]
            return reduce(self._union, runs) if isinstance(part, Minimum) else _intersection(runs)
        raise self._no_bound(condition)

    def _from(self, part: Expr, limit: Expr, condition: Expr) -> Run:
        """Return the run of keys at which a part is at least a limit."""
        if part == KEY:
            return Run(firsts=(self._checked(limit, condition),))
        if isinstance(part, Floor) and _is_of_integers(part):
            numerator, divisor = sympy.fraction(sympy.together(part.args[0]))
            return self._where_not_positive(divisor * limit - numerator, condition)
        if isinstance(part, (Minimum, Maximum)):
            runs = [self._where_not_positive(limit - each, condition) for each in part.args]
            return reduce(self._union, runs) if isinstance(part, Maximum) else _intersection(runs)
        raise self._no_bound(condition)

    def _checked(self, limit: Expr, condition: Expr) -> Expr:
        """Return a bound after checking that integers of 64 bits can compute it."""
        large = any(abs(number) > LARGEST for number in limit.atoms(sympy.Integer))
        if large or not all(_is_of_integers(floor) for floor in limit.atoms(sympy.floor)):
            raise self._no_bound(condition)
        return limit

    def _union(self, one: Run, other: Run) -> Run:
        """Return the union of two runs that both begin, or both end, with the same bounds."""
        if one.firsts == other.firsts:
            return Run(one.firsts, (Maximum(one.last, other.last),) if one.lasts and other.lasts else ())
        if one.lasts == other.lasts:
            return Run((Minimum(one.first, other.first),) if one.firsts and other.firsts else (), one.lasts)
        both = f"{write(one.condition)} and {write(other.condition)}"
        rule = f"its keys may be two runs with a gap: {both}"
        raise SpecError(explain("visible", self._text, rule, _LEGAL))

    def _no_bound(self, condition: Expr) -> SpecError:
        rule = f"{write(condition)} is no bound of a run of keys"
        return SpecError(explain("visible", self._text, rule, _LEGAL))


def _in_order(condition: Boolean) -> list[Boolean]:
    return sorted(condition.args, key=sympy.default_sort_key)


def _intersection(runs: Sequence[Run]) -> Run:
    firsts, lasts = ({bound for run in runs for bound in run[side]} for side in (0, 1))
    return Run(*(tuple(sorted(bounds, key=sympy.default_sort_key)) for bounds in (firsts, lasts)))
