"""The option ``visible``: conditions on keys, read as the first and the last key that a query sees.

A condition that a run of keys meets, without gaps, is a pair of bounds. Kernels take both for each
query from memory. Bounds of any other condition may contain hidden keys, so kernels check each pair
of a query and a key inside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from itertools import repeat
from typing import Any, NamedTuple

import sympy
from sympy import Expr
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, to_nnf

from ..errors import SpecError, explain
from .given import text_of
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
    write,
)
from .parameters import Parameter, read_parameters
from .ranges import LARGEST_PLACE, is_of_integers, magnitude

_LEGAL = "comparisons of integers such as (j <= i) | (j < prefix[b]), i // 64 == j // 64 or (i - j) % 4 == 0"


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


class Gap(NamedTuple):
    """Keys between two runs, which both hide: from ``first`` to ``last``, expressions of the query."""

    first: Expr
    last: Expr


class Seen(NamedTuple):
    """The keys that meet a condition.

    Attributes:
        run: contains them all.
        checked: the condition that decides which keys of the run they are; true if they are all.
        unchecked: the bounds of the run that ``checked`` does not imply.
        gaps: keys of the run that do not meet the condition. A query may have none in some gaps.
    """

    run: Run
    checked: Boolean = sympy.true
    unchecked: Run = Run()
    gaps: tuple[Gap, ...] = ()


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
def seen_by(text: str | None, parameters: tuple[tuple[str, str], ...]) -> Seen:
    """Return the keys that a query sees by the fields of a spec.

    Raises:
        SpecError: the text is not in the language, or no mask.
    """
    return Seen(Run()) if text is None else _read(text, read_parameters(parameters))


def parameters_in(text: str, parameters: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Return the names of the parameters that a canonical text reads, of those of a spec."""
    seen = seen_by(text, parameters)
    return _parameters_of(seen.run) | loaded(seen.checked)


def parameters_of_bounds(
    text: str, parameters: tuple[tuple[str, str], ...], *, with_gaps: bool = False
) -> frozenset[str]:
    """Return the names of the parameters that decide the first and the last key of each query, and the gaps between."""
    seen = seen_by(text, parameters)
    gaps = (loaded(bound) for gap in seen.gaps for bound in gap)
    return _parameters_of(seen.run).union(*(gaps if with_gaps else ()))


def loaded(expr: Expr | Boolean) -> frozenset[str]:
    """Return the names of the parameters that an expression or condition reads."""
    return frozenset(load.parameter for load in expr.atoms(Load))


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
        SpecError: the condition is not in the language, no mask, or changes nothing.
    """
    if given is None:
        return Visible(None, left, right)
    known = read_parameters(parameters)
    text = text_of("visible", given, known, has_integers=True)
    mask = _normalised(text, known, left, right)
    forms: list[Visible] = []
    while mask.text is not None and mask not in forms:  # a text may be read in another form than it was written
        forms.append(mask)
        mask = _normalised(mask.text, known, mask.left, mask.right)
    if mask == Visible(None, left, right) and right is not None:
        alone = _normalised(text, known, None, None).right
        if alone is None or alone > right:
            rule = "changes nothing, because causal or window hides all later keys that it would show"
            raise SpecError(explain("visible", text, rule, "causal=False, or no condition"))
    return min(forms[forms.index(mask) :], key=str) if mask in forms else mask


def _normalised(text: str, known: Sequence[Parameter], left: int | None, right: int | None) -> Visible:
    (firsts, lasts), checked, unchecked, _ = _read(text, known)
    before = [-_range_from_position(first) for first in firsts]
    after = [_range_from_position(last) for last in lasts]
    # The limits of the window: keys that every query's bounds leave out are hidden by the window, too.
    left = _least([left, *(max(0, span.high) for span in before)])
    right = _least([right, *(max(0, span.high) for span in after)])
    kept = Run(
        tuple(x for x, span in zip(firsts, before, strict=True) if x in unchecked.firsts and _exceeds(span, left)),
        tuple(x for x, span in zip(lasts, after, strict=True) if x in unchecked.lasts and _exceeds(span, right)),
    )
    read = _parameters_of(kept) | loaded(checked)
    if unread := sorted(_parameters_of(Run(firsts, lasts)) - read):
        rule = (
            f"{', '.join(unread)} changes nothing, because causal, window or another part of the condition hides more"
        )
        raise SpecError(explain("visible", text, rule, "a condition without it, or a wider mask, such as causal=False"))
    condition = sympy.And(kept.condition, checked)
    return Visible(None if condition == sympy.true else write(condition), left, right, read)


def _exceeds(span: _Span, limit: int | None) -> bool:
    """Return whether a bound may hide keys that a limit of the window does not."""
    return limit is None or span.low < limit


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
    return None if least >= LARGEST_PLACE else int(least)


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

    whole = [floor for floor in bound.atoms(Floor) if is_of_integers(floor)]
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


def _read(text: str, parameters: Sequence[Parameter]) -> Seen:
    """Return the keys that a query sees by a text.

    Raises:
        SpecError: the text is not in the language, or no mask.
    """
    condition = read_condition("visible", text, parameters)
    if condition.free_symbols & {SCORE, HEAD}:
        rule, legal = "a mask is the same for all scores and heads", "conditions in i, j, b and parameters"
        raise SpecError(explain("visible", text, rule, legal))
    condition = _in_integers(text, condition)
    if condition == sympy.false:
        raise SpecError(explain("visible", text, "no query sees a key", _LEGAL))
    return _seen(condition)


# Comparisons of integers without equality, as one with equality to a number that is so much more.
_WITH_EQUALITY = {sympy.StrictLessThan: (sympy.LessThan, -1), sympy.StrictGreaterThan: (sympy.GreaterThan, 1)}


def _in_integers(text: str, condition: Boolean) -> Boolean:
    """Return a condition without negations, whose comparisons are of integers that 64 bits hold with a number.

    Raises:
        SpecError: a comparison is of other numbers.
    """

    def compared(comparison: Relational) -> Boolean:
        difference = sympy.fraction(sympy.together(comparison.lhs - comparison.rhs))[0].expand()
        divides = all(is_of_integers(floor) for floor in comparison.atoms(sympy.floor))
        if not (divides and difference.is_integer and magnitude(difference) < 2**63):
            rule = f"{write(comparison)} compares real numbers, or larger ones than 64 bits hold"
            raise SpecError(explain("visible", text, rule, _LEGAL))
        number, rest = difference.as_coeff_Add()
        operator, more = _WITH_EQUALITY.get(comparison.func, (comparison.func, 0))
        inclusive = operator(rest, more - number)
        return inclusive.reversedsign if rest.could_extract_minus_sign() else inclusive

    return to_nnf(condition.replace(lambda part: isinstance(part, Relational), compared), simplify=False)


def _seen(condition: Boolean) -> Seen:
    """Return the keys that meet a condition of integers."""
    if condition == sympy.true:
        return Seen(Run())
    if isinstance(condition, sympy.And):
        seen = [_seen(part) for part in _in_order(condition)]
        return Seen(
            _intersection([part.run for part in seen]),
            sympy.And(*(part.checked for part in seen)),
            _intersection([part.unchecked for part in seen]),
            tuple(gap for part in seen for gap in part.gaps),
        )
    if isinstance(condition, sympy.Or):
        seen = [_seen(part) for part in _in_order(condition)]
        runs = [part.run for part in seen]
        union = _union(runs) if all(part.checked == sympy.true for part in seen) else None
        if union is None:
            return Seen(_hull(runs), condition, gaps=_gaps(runs))
    else:
        union = _run_of(condition)
    return Seen(Run(), condition) if union is None else Seen(union, unchecked=union)


def _run_of(comparison: Relational) -> Run | None:
    """Return the run of keys that meet a comparison, or None if it is no bound."""
    below = comparison.lhs - comparison.rhs
    above = -below
    match comparison:
        case sympy.LessThan():
            return _where_not_positive(below)
        case sympy.GreaterThan():
            return _where_not_positive(above)
        case sympy.Eq():
            return _combined(_intersection, map(_where_not_positive, (below, above)))
    return None


def _where_not_positive(expr: Expr) -> Run | None:
    """Return the run of keys at which an integer is at most 0.

    The integer is a sum of which one term depends on the key: the key itself, a quotient or an
    extremum. Otherwise it is no bound, and the result is None.
    """
    terms = sympy.Add.make_args(expr.expand())
    of_key = [term for term in terms if term.has(KEY)]
    if len(of_key) != 1:
        return None
    factor, part = of_key[0].as_coeff_Mul()
    rest = sympy.Add(*(term for term in terms if not term.has(KEY)))
    if not factor.is_Integer:
        return None
    if factor > 0:
        return _up_to(part, Floor(-rest / factor))
    return _from(part, -Floor(rest / factor))


def _up_to(part: Expr, limit: Expr) -> Run | None:
    """Return the run of keys at which a part is at most a limit."""
    if part == KEY:
        return Run(lasts=(limit,)) if _is_bound(limit) else None
    if isinstance(part, Floor) and is_of_integers(part):
        numerator, divisor = sympy.fraction(sympy.together(part.args[0]))
        return _where_not_positive(numerator - divisor * limit - divisor + 1)
    if isinstance(part, (Minimum, Maximum)):
        runs = (_where_not_positive(each - limit) for each in part.args)
        return _combined(_union if isinstance(part, Minimum) else _intersection, runs)
    return None


def _from(part: Expr, limit: Expr) -> Run | None:
    """Return the run of keys at which a part is at least a limit."""
    if part == KEY:
        return Run(firsts=(limit,)) if _is_bound(limit) else None
    if isinstance(part, Floor) and is_of_integers(part):
        numerator, divisor = sympy.fraction(sympy.together(part.args[0]))
        return _where_not_positive(divisor * limit - numerator)
    if isinstance(part, (Minimum, Maximum)):
        runs = (_where_not_positive(limit - each) for each in part.args)
        return _combined(_union if isinstance(part, Maximum) else _intersection, runs)
    return None


def _is_bound(limit: Expr) -> bool:
    """Return whether integers of 64 bits can compute a bound."""
    large = any(abs(number) > LARGEST_PLACE for number in limit.atoms(sympy.Integer))
    return not large and all(is_of_integers(floor) for floor in limit.atoms(sympy.floor))


def _in_order(condition: Boolean) -> list[Boolean]:
    return sorted(condition.args, key=sympy.default_sort_key)


def _combined(combine: Callable[[list[Run]], Run | None], runs: Iterable[Run | None]) -> Run | None:
    """Return the intersection or union of some runs, or None if one of them is none."""
    known: list[Run] = []
    for run in runs:
        if run is None:
            return None
        known.append(run)
    return combine(known)


def _intersection(runs: Sequence[Run]) -> Run:
    firsts, lasts = ({bound for run in runs for bound in run[side]} for side in (0, 1))
    return Run(*(tuple(sorted(bounds, key=sympy.default_sort_key)) for bounds in (firsts, lasts)))


def _union(runs: Sequence[Run]) -> Run | None:
    """Return the union of runs that all begin, or all end, with the same bounds; None of others."""
    is_run = len({run.firsts for run in runs}) == 1 or len({run.lasts for run in runs}) == 1
    return _hull(runs) if is_run else None


def _hull(runs: Sequence[Run]) -> Run:
    """Return the least run that contains some runs."""
    firsts, lasts = ([run.first for run in runs], [run.last for run in runs])
    return Run(
        () if None in firsts else (reduce(Minimum, firsts),),
        () if None in lasts else (reduce(Maximum, lasts),),
    )


def _gaps(runs: Sequence[Run]) -> tuple[Gap, ...]:
    """Return the keys between two runs: after the last of one, and before the first of the other."""
    if len(runs) != 2:
        return ()
    pairs = ((one.last, other.first) for one, other in (runs, runs[::-1]))
    gaps = (Gap(last + 1, first - 1) for last, first in pairs if last is not None and first is not None)
    return tuple(gap for gap in gaps if not (gap.first - gap.last).expand().is_positive)
