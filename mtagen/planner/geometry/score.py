"""The functions of scores before the softmax, and which pairs of query and key are visible."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, prod
from typing import NamedTuple

import sympy
from sympy import Add, Expr, Integer, Mul, Rational, Symbol
from sympy.logic.boolalg import Boolean

from ...expressions import language
from ...expressions.functions import functions_of
from ...expressions.parameters import Parameter, block_size, read_parameters
from ...expressions.ranges import range_of
from ...spec import EXPRESSIONS, Spec, parameter_name
from .mask import Mask

# The parameters of the functions of a score, and their names in kernels: the score, the gradient of what it becomes,
# the position of its query, its key, and its head of queries.
SCORE, GRADIENT = sympy.symbols("score gradient", real=True)
POSITION, KEY, HEAD = sympy.symbols("position key head", integer=True)
# Entries along an axis of tokens of parameters.
TOKENS = Symbol("tokens", integer=True, positive=True)
# position - key as a real number
DISTANCE = Symbol("distance", real=True)
# A score that a kernel holds is in units of log2 after it is multiplied by this number, which may be known only at run
# time.
EXPONENT = Symbol("exponent", positive=True)


class Entry(Expr):  # type: ignore[misc]
    """A number in memory: a symbol for an address, and how many numbers after it.

    The number is an integer if the symbol is one.
    """

    is_real = True

    def __new__(cls, view: Symbol, offset: Expr) -> Expr:
        return super().__new__(cls, view, sympy.sympify(offset))

    def _eval_is_integer(self) -> bool | None:
        return True if self.args[0].is_integer else None

    def _eval_derivative(self, symbol: Symbol) -> Expr:
        return Integer(0)


@dataclass(frozen=True)
class View:
    """The part of a parameter that a head of a sequence reads: consecutive numbers in memory.

    Parameters lie as ``[batch entry][head][table][token]``, in C order. Tokens of packed documents follow one
    another, and the axis of batch entries is left out there.

    Attributes:
        parameter: the parameter.
    """

    parameter: Parameter

    @property
    def symbol(self) -> Symbol:
        """The address of the numbers."""
        return Symbol(f"{self.parameter.name}_view")

    @property
    def argument(self) -> str:
        """The name of the parameter in host functions and kernels."""
        return parameter_name(self.parameter.name)

    @property
    def table(self) -> int:
        """Numbers of a table; 1 without one."""
        return prod(axis for axis in self.parameter.axes if isinstance(axis, int))

    @property
    def has_entries(self) -> bool:
        """Whether batch entries have numbers of their own."""
        return "b" in self.parameter.axes

    @property
    def has_heads(self) -> bool:
        """Whether heads have numbers of their own."""
        return "h" in self.parameter.axes

    @property
    def token_axes(self) -> int:
        """Number of axes of tokens."""
        return len(self.parameter.tokens)

    def offset(self, indices: tuple[Expr, ...]) -> Expr:
        """Return where an entry lies, counted from the view. Hidden scores may have indices outside: they are cut."""
        row, places = Integer(0), zip(self.parameter.axes, indices, strict=True)
        for axis, index in places:
            if isinstance(axis, int):
                row = row * axis + _cut(index, axis)
            elif axis in ("i", "j"):
                row = row * TOKENS + language.Minimum(language.Maximum(index, 0), TOKENS - 1)
            elif size := block_size(axis):
                blocks = language.Floor((TOKENS + size - 1) / size)
                row = row * blocks + language.Minimum(language.Maximum(index, 0), blocks - 1)
        return row


def _cut(index: Expr, extent: int) -> Expr:
    """Return an index that stays in an axis for all places, not only those of visible scores."""
    low, high = range_of(index, (-inf, inf))
    bounded = index if low >= 0 else language.Maximum(index, 0)
    return bounded if high < extent else language.Minimum(bounded, extent - 1)


class FastTanh(sympy.Function):  # type: ignore[misc]
    """The hyperbolic tangent with an error of 2^-11 of its value, which GPUs have as an instruction."""

    nargs = 1
    is_real = True


class Added(NamedTuple):
    """The terms that keys, positions and distances add to the value of a score.

    Attributes:
        of_key: what depends on the key, besides the head.
        of_position: what depends on the position.
        of_distance: what depends on ``POSITION - KEY``.
    """

    of_key: Expr
    of_position: Expr
    of_distance: Expr


_NOTHING = Integer(0)
_NOTHING_ADDED = Added(_NOTHING, _NOTHING, _NOTHING)


@dataclass(frozen=True)
class ScoreFunction:
    """The function of a score and its gradient, as kernels compute them.

    Attributes:
        parts: values that depend on the head only, each with the symbol that the functions have for it.
            A kernel computes the parts once for each of its heads.
        modify: what the softmax takes for ``SCORE``.
        modify_backward: the gradient of the score from the ``GRADIENT`` of its value.
        exponent: what turns a value of ``modify`` into an exponent of 2.
        growth: by how much this exponent grows from a key to the next, if that depends on the head only and is
            not known to be negative; otherwise 0.
        added: what places add to this exponent.
        rest: ``modify`` without what places add.
        shares_keys: whether kernels should compute what a key adds once for several rows.
        shares_distances: whether kernels should compute what a distance adds once for several pairs.
        same_from: the least distance from which on all distances add the same; None if none is known.
        views: what the function reads of parameters, in their order.
        sums: the gradients of what it reads.
    """

    parts: tuple[tuple[Symbol, Expr], ...]
    modify: Expr
    modify_backward: Expr
    exponent: Expr = EXPONENT
    growth: Expr = _NOTHING
    added: Added = _NOTHING_ADDED
    rest: Expr = SCORE
    shares_keys: bool = False
    shares_distances: bool = False
    same_from: int | None = None
    views: tuple[View, ...] = ()
    sums: tuple[ParameterSum, ...] = ()

    @property
    def reads_places(self) -> bool:
        """Whether the value of a score depends on its position or key."""
        return bool(self.modify.free_symbols & {POSITION, KEY, DISTANCE})

    @property
    def loads_entries(self) -> bool:
        """Whether each score, and not only each head, loads entries of parameters."""
        return bool(self.modify.has(Entry))

    def symbols(self, expr: Expr) -> list[tuple[int, Symbol]]:
        """Return the head, the views and the parts that one of the functions names, with their numbers.

        The head is number 0, and ``TOKENS`` number 1 if there are views.
        """
        views = [TOKENS, *(view.symbol for view in self.views)] if self.views else []
        known = enumerate([HEAD, *views, *(symbol for symbol, _ in self.parts)])
        return [(number, symbol) for number, symbol in known if expr.has(symbol)]

    def with_fast_tanh(self) -> ScoreFunction:
        """Return the function with the tanh of each score from the GPU's instruction."""
        names = ("modify", "modify_backward", "rest")
        return replace(self, **{name: getattr(self, name).replace(sympy.tanh, FastTanh) for name in names})


@dataclass(frozen=True)
class ParameterSum:
    """The gradient of the entries of a parameter that one load reads.

    Attributes:
        name: of the sum in kernels.
        view: the parameter.
        kind: which scores add to an entry: ``head``: all of a head; ``key`` and ``row``: those of a key or a
            row; ``pair``: one; ``table``: those with its number in a table.
        offset: where the entry of a score lies, counted from the view; for ``table`` only.
        term: what a score adds, an expression in ``GRADIENT``.
    """

    name: str
    view: View
    kind: str
    offset: Expr
    term: Expr

    @property
    def factor(self) -> Expr:
        """The factor of a score's gradient in the sum."""
        return self.term / GRADIENT

    @property
    def is_of_columns(self) -> bool:
        """Whether the sum is a number times the sum of the gradients of a key's scores."""
        return self.kind == "key" and bool(self.factor.is_number)

    @property
    def is_of_distance(self) -> bool:
        """Whether the entry, and what a score adds, depend on places by ``POSITION - KEY`` only."""
        return not any(map(_counts_keys, (self.offset, self.term)))


def learned_views(spec: Spec) -> tuple[View, ...]:
    """Return the parameters of expressions that have gradients, in the order of the request."""
    return tuple(view for view in views_of(spec) if view.parameter.name not in spec.constants)


def views_of(spec: Spec, *places: str) -> tuple[View, ...]:
    """Return the parameters that the functions of scores read at some places, in the order of the request."""
    read = {view for place in places or EXPRESSIONS for view in ScoreStage.of(spec, place).views}
    return tuple(view for view in map(View, read_parameters(spec.parameters)) if view in read)


@dataclass(frozen=True)
class ScoreStage:
    """The mask, and the function that applies to scores at one place of the pipeline.

    It is printed as functions, which templates call without asking what they are: ``visible``, and
    ``modify`` and ``modify_backward`` of its :class:`ScoreFunction`.

    Attributes:
        visible: the keys that each query sees. Bounds of loops and edge tiles follow from it, too.
        modify: the function, an expression in ``SCORE``, ``POSITION``, ``KEY`` and ``HEAD``; the
            identity by default.
        views: the parameters that the function reads, in their order.
        sums: the gradients of what the function reads, except constants.
        place: the option of the request that describes the function.
    """

    visible: Mask
    modify: Expr = SCORE
    views: tuple[View, ...] = ()
    sums: tuple[ParameterSum, ...] = ()
    place: str = "logits"

    @classmethod
    def of(cls, spec: Spec, place: str = "logits") -> ScoreStage:
        """Return what a request does with its scores at one of the places ``EXPRESSIONS``."""
        return _stage(spec, place)

    @property
    def is_identity(self) -> bool:
        """Whether the next stage takes scores as they are."""
        return bool(self.modify == SCORE)

    @cached_property
    def name(self) -> str:
        """The part of kernel names that tells functions of a place apart; empty for the identity."""
        summed = {x.view for x in self.sums}
        constant = {view: "" if view in summed else " constant" for view in self.views}
        read = "".join(f"{view.parameter.name}[{view.parameter.text}]{constant[view]}" for view in self.views)
        digest = hashlib.sha256(f"{self.modify}{read}".encode()).hexdigest()[:8]
        return "" if self.is_identity else f"{self.place}{digest}"

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
        modify = Add(*of_score, exact * Add(*(term for term in terms if not term.has(SCORE))))
        sums = tuple(replace(x, term=x.term.xreplace({SCORE: SCORE / exact})) for x in self.sums)
        return replace(self, modify=modify, sums=sums)

    @cached_property
    def sums_from_scores(self) -> tuple[ParameterSum, ...]:
        """The gradients of what the function reads, from the ``GRADIENT`` of the score instead of that of its value.

        Raises:
            ValueError: one cannot be told from that, because it depends on the score, or the slope does.
        """
        slope = sympy.diff(self.modify, SCORE)
        if self.sums and (not slope.is_number or slope == 0 or any(x.term.has(SCORE) for x in self.sums)):
            raise ValueError(str(self.modify))
        return tuple(replace(x, term=x.term.subs(GRADIENT, GRADIENT / slope)) for x in self.sums)

    @cached_property
    def counts_keys(self) -> bool:
        """Whether the function depends on where keys lie in the sequence, not only on their distance from queries."""
        return _counts_keys(self.modify)

    @cached_property
    def function(self) -> ScoreFunction:
        """The function of scores in kernels that know the unit of scores when they are printed."""
        parts = _Parts(frozenset({HEAD, *self._addresses}))
        modify, modify_backward = map(parts.split, (self.modify, self.modify_backward))
        sums = tuple(replace(x, term=parts.split(x.term)) for x in self.sums)
        return ScoreFunction(parts.all, modify, modify_backward, views=self.views, sums=sums)

    @property
    def _addresses(self) -> tuple[Symbol, ...]:
        """The symbols that entries of parameters have besides places."""
        return (TOKENS, *(view.symbol for view in self.views)) if self.views else ()

    @cached_property
    def function_of_any_unit(self) -> ScoreFunction:
        """The function of scores in kernels that learn their ``EXPONENT`` when they run.

        A sum of the score and others keeps its unit, because the softmax multiplies the sum anyway.
        Other values are in units of log2, so that one multiplication scales them.
        """
        modify, exponent = self._in_any_unit
        parts = _Parts(frozenset({HEAD, EXPONENT, *self._addresses}), DISTANCE)
        added = self.added
        rest, _ = replace(self, modify=self.modify - Add(*added))._in_any_unit
        growth = sympy.expand(exponent * (modify.xreplace({KEY: KEY + 1}) - modify))
        if rest.has(KEY) or not parts.contain(growth) or growth.is_nonpositive:
            growth = Integer(0)
        costly = {x for term in added for x in term.atoms(Entry, sympy.Function)}
        shares = any(_dependence(x) != "position" for x in costly)
        shares_distances = shares and added.of_distance != 0
        modify, modify_backward = map(parts.split, (modify, self._held.modify_backward))
        growth, rest, *in_log2 = map(parts.split, (growth, rest, *(term / sympy.log(2) for term in added)))
        sums = tuple(replace(x, term=parts.split(x.term)) for x in self._held.sums)
        added = Added(*in_log2)
        return ScoreFunction(
            *(parts.all, modify, modify_backward, exponent, growth, added, rest),
            shares_keys=shares and added.of_key != 0,
            shares_distances=shares_distances,
            same_from=_same_from(self.added.of_distance) if shares_distances else None,
            views=self.views,
            sums=sums,
        )

    @property
    def _held(self) -> ScoreStage:
        """The stage of scores in units of log2 over ``EXPONENT``."""
        return self.scaled(1 / (EXPONENT * sympy.log(2)))

    @property
    def _in_any_unit(self) -> tuple[Expr, Expr]:
        """The value of a score, and what turns it into an exponent of 2."""
        if SCORE in Add.make_args(self.modify):
            return self._held.modify, EXPONENT
        return Add(*(EXPONENT * term for term in Add.make_args(self._held.modify))), Integer(1)

    @cached_property
    def added(self) -> Added:
        """The terms that depend on one of key, position and distance, besides the head."""
        terms = Add(*(term for term in Add.make_args(self.modify) if not term.has(SCORE)))
        number, integer, others = language.split_sum(terms)
        added = dict.fromkeys(("key", "position", "distance", "both"), Integer(0))
        integers = Add.make_args(integer) if _dependence(integer) == "both" else (integer,)
        for term in (*(number * x for x in integers), *others):
            added[_dependence(term)] += term
        return Added(added["key"], added["position"], added["distance"])


def _dependence(expr: Expr) -> str:
    """Return what an expression depends on besides the head: the key, the position, their distance, or both.

    A number counts as one of the position.
    """
    places = expr.free_symbols & {POSITION, KEY}
    if len(places) < 2:
        return "key" if KEY in places else "position"
    return "both" if _counts_keys(expr) else "distance"


_FARTHEST = 2**20  # the largest distance that is tried


def _same_from(of_distance: Expr) -> int | None:
    """Return the least distance from which on a function of the distance is known to be constant, if there is one."""
    expr = of_distance.xreplace({POSITION: language.POSITION, KEY: language.KEY})
    if not _is_same_from(expr, _FARTHEST):
        return None
    return bisect_left(range(_FARTHEST), True, key=lambda distance: _is_same_from(expr, distance))


def _is_same_from(expr: Expr, distance: int) -> bool:
    """Return whether a function of the distance is known to be constant from a distance on."""
    if not expr.free_symbols & {language.POSITION, language.KEY}:
        return True
    if isinstance(expr, Entry):
        return _is_same_from(expr.args[1], distance)
    if expr.is_integer:
        low, high = range_of(expr, (distance, inf))
        return low == high and abs(low) < 2**31  # not where a bound is cut off
    return (expr.is_Add or expr.is_Mul) and all(_is_same_from(part, distance) for part in expr.args)


def _counts_keys(expr: Expr) -> bool:
    """Return whether an expression depends on places otherwise than by ``POSITION - KEY``."""
    shift = sympy.Dummy(integer=True)
    moved = expr.subs({POSITION: POSITION + shift, KEY: KEY + shift}, simultaneous=True)
    return bool(sympy.expand(moved - expr) != 0)


class _Parts:
    """Splits expressions into parts that depend on some symbols only, and expressions that name the parts.

    Integers stay whole, because sums of places must be exact before they are rounded.

    Args:
        symbols: what parts depend on.
        distance: the symbol of the real number ``POSITION - KEY``, if kernels have this number.
    """

    def __init__(self, symbols: frozenset[Symbol], distance: Symbol | None = None) -> None:
        self._symbols = symbols
        self._distance = distance
        self._known: dict[Expr, Symbol] = {}

    @property
    def all(self) -> tuple[tuple[Symbol, Expr], ...]:
        """The parts of all expressions that were split."""
        return tuple((symbol, expr) for expr, symbol in self._known.items())

    def contain(self, expr: Expr) -> bool:
        """Return whether an expression is a part."""
        return bool(expr.free_symbols <= self._symbols)

    def split(self, expr: Expr) -> Expr:
        """Return a real number with symbols for its parts."""
        if self.contain(expr):
            return self._part(expr)
        if isinstance(expr, Entry):
            return expr
        if expr.is_integer:
            return self._integer(expr)
        if expr.is_Add:
            return self._sum(expr)
        if expr.is_Mul:
            return self._product(expr)
        if expr.is_Pow:
            base, exponent = expr.args
            return self.split(base) ** exponent
        if isinstance(expr, language.Where):
            condition, value, other = expr.args
            return language.Where(self._condition(condition), self.split(value), self.split(other))
        return expr.func(*map(self.split, expr.args)) if expr.args else expr

    def _part(self, expr: Expr) -> Expr:
        """Return the symbol of a part. A number or the head itself needs none."""
        if expr.is_number or expr == HEAD:
            return expr
        return self._known.setdefault(expr, Symbol(f"part{len(self._known)}", real=True))

    def _integer(self, expr: Expr) -> Expr:
        if self._distance is not None:
            for sign in (1, -1):
                rest = expr - sign * (POSITION - KEY)
                if rest.is_number:
                    return sign * self._distance + rest
        return expr

    def _sum(self, expr: Expr) -> Expr:
        number, integer, others = language.split_sum(expr)
        terms = [*others, number * integer] if self.contain(integer) else others
        whole = 0 if self.contain(integer) else number * self._integer(integer)
        fixed = self._part(Add(*filter(self.contain, terms)))
        return Add(whole, fixed, *(self.split(term) for term in terms if not self.contain(term)))

    def _product(self, expr: Expr) -> Expr:
        number, factors = expr.as_coeff_mul()
        contents = [factor.primitive() if factor.is_Add else (Integer(1), factor) for factor in factors]
        number = Mul(number, *(content for content, _ in contents))
        fixed = Mul(*(factor for _, factor in contents if self.contain(factor)))
        if not fixed.is_number:
            number, fixed = sympy.sign(number), self._part(abs(number) * fixed)
        return Mul(number, fixed, *(self.split(factor) for _, factor in contents if not self.contain(factor)))

    def _condition(self, expr: Boolean) -> Boolean:
        if expr.is_Relational:
            return expr if all(side.is_integer for side in expr.args) else expr.func(*map(self.split, expr.args))
        return expr.func(*map(self._condition, expr.args))


@cache
def _stage(spec: Spec, place: str) -> ScoreStage:
    functions = functions_of(spec.expressions, spec.parameters)
    if place not in functions:
        return ScoreStage(Mask.of(spec), place=place)
    expr = functions[place].expr
    views = {view.parameter.name: view for view in map(View, read_parameters(spec.parameters))}
    entries = {}
    for load in expr.atoms(language.Load):
        view = views[load.parameter]
        entries[load] = Entry(view.symbol, view.offset(load.indices))
    names = {language.SCORE: SCORE, language.POSITION: POSITION, language.KEY: KEY, language.HEAD: HEAD}
    read = tuple(view for name, view in views.items() if any(load.parameter == name for load in entries))
    modify = expr.xreplace(entries).xreplace(names)
    learned = {entry for load, entry in entries.items() if load.parameter not in spec.constants}
    found = sorted({entry.xreplace(names) for entry in learned}, key=str)
    sums = (_sum_of(modify, f"{place}_sum{number}", entry, read) for number, entry in enumerate(found))
    return ScoreStage(Mask.of(spec), modify, read, tuple(sums), place)


def _sum_of(modify: Expr, name: str, entry: Entry, views: tuple[View, ...]) -> ParameterSum:
    """Return the gradient of an entry that a function reads."""
    (view,) = (view for view in views if view.symbol == entry.args[0])
    symbol = sympy.Dummy(real=True)
    slope = modify.xreplace({entry: symbol}).diff(symbol).xreplace({symbol: entry})
    term = GRADIENT * slope
    if not slope.is_number:
        term = language.Where(sympy.Ne(GRADIENT, 0), term, 0)
    offset = entry.args[1]
    if view.token_axes == 2:
        kind = "pair"
    elif view.token_axes:
        kind = "row" if offset.has(POSITION) else "key"
    else:
        kind = "table" if view.table > 1 else "head"
    return ParameterSum(name, view, kind, offset, term)
