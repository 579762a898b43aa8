"""The language of score expressions, read into sympy and written from it.

A text is read by Python's parser and translated piece by piece. It is never evaluated, because
plans are read from files.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, ClassVar, TypeAlias

import sympy
from sympy import Expr, Integer, Rational
from sympy.logic.boolalg import Boolean
from sympy.printing.str import StrPrinter

from ..errors import SpecError, explain
from .parameters import Parameter, block_size

SCORE = sympy.Symbol("s", real=True)
POSITION, KEY, HEAD = sympy.symbols("i j h", integer=True)
ENTRY = sympy.Symbol("b", integer=True)  # the batch entry or document, which only indices name
NAMES = {str(symbol): symbol for symbol in (SCORE, POSITION, KEY, HEAD)}
LONGEST = 1000  # characters of a text
DEEPEST = 50  # parentheses, functions and signs in each other; sympy recurses several times for each
LARGEST = 2**127  # numbers are those of fp32
LARGEST_POWER = 16
_ANY_DISTANCE = (-math.inf, math.inf)

Value: TypeAlias = Expr | Boolean
Function: TypeAlias = Callable[..., Any]


class Where(Expr):  # type: ignore[misc]
    """A number where a condition holds, and another elsewhere. Unlike sympy's Piecewise it is never rearranged."""

    is_real = True

    def __new__(cls, condition: Value | bool, value: Any, other: Any) -> Expr:
        condition, value, other = map(sympy.sympify, (condition, value, other))
        if condition in (sympy.true, sympy.false) or value == other:
            return value if condition == sympy.true else other
        return super().__new__(cls, condition, value, other)

    def _eval_is_integer(self) -> bool | None:
        return True if all(number.is_integer for number in self.args[1:]) else None

    def _eval_derivative(self, symbol: sympy.Symbol) -> Expr:
        condition, value, other = self.args
        return Where(condition, value.diff(symbol), other.diff(symbol))


class Load(Expr):  # type: ignore[misc]
    """An entry of a parameter: a symbol named after it, and an index for each axis.

    The symbol is an integer in the option ``visible``.
    """

    is_real = True
    is_commutative = True

    def _eval_is_integer(self) -> bool | None:
        return True if self.args[0].is_integer else None

    def __new__(cls, parameter: sympy.Symbol, *indices: Any) -> Expr:
        return super().__new__(cls, parameter, *map(sympy.sympify, indices))

    @property
    def parameter(self) -> str:
        """The name of the parameter."""
        return str(self.args[0])

    @property
    def indices(self) -> tuple[Expr, ...]:
        """The index of each axis."""
        return tuple(self.args[1:])

    def _eval_derivative(self, symbol: sympy.Symbol) -> Expr:
        return Integer(0)


class Floor(sympy.floor):  # type: ignore[misc]
    """The largest integer that is not larger. Sympy does not know that such numbers as log(i) are real."""

    def _eval_is_integer(self) -> bool:
        return True

    def _eval_is_real(self) -> bool:
        return True


class _Extremum(sympy.Function):  # type: ignore[misc]
    """An extremum of two numbers. Sympy's own has no derivative that kernels can compute.

    Attributes:
        comparison: the first number is the extremum where it compares like this with the second.
    """

    nargs = 2
    is_real = True
    comparison: ClassVar[Any]

    @classmethod
    def eval(cls, first: Expr, second: Expr) -> Expr | None:
        if first == second:
            return first
        if first.is_number and second.is_number:
            return first if cls.chosen(first.evalf(), second.evalf()) else second
        if sympy.default_sort_key(second) < sympy.default_sort_key(first):
            return cls(second, first)
        return None

    @classmethod
    def chosen(cls, first: Expr, second: Expr) -> Boolean:
        """Return the condition that the extremum is the first number."""
        return cls.comparison(first, second)

    def _eval_is_integer(self) -> bool | None:
        return True if all(argument.is_integer for argument in self.args) else None

    def _eval_derivative(self, symbol: sympy.Symbol) -> Expr:
        first, second = (argument.diff(symbol) for argument in self.args)
        return Where(self.chosen(*self.args), first, second)


class Minimum(_Extremum):
    """The lesser of two numbers."""

    comparison = sympy.LessThan


class Maximum(_Extremum):
    """The greater of two numbers."""

    comparison = sympy.GreaterThan


def minimum(*values: Any) -> Expr:
    """Return the least of some numbers."""
    return reduce(Minimum, map(sympy.sympify, values))


def maximum(*values: Any) -> Expr:
    """Return the greatest of some numbers."""
    return reduce(Maximum, map(sympy.sympify, values))


def absolute(value: Any) -> Expr:
    """Return the absolute value."""
    return maximum(value, -value)


def floor(value: Any) -> Expr:
    """Return the largest integer that is not larger."""
    return Floor(value)


# Each function, and the numbers of arguments that it takes.
FUNCTIONS: dict[str, tuple[Function, range]] = {
    "tanh": (sympy.tanh, range(1, 2)),
    "exp": (sympy.exp, range(1, 2)),
    "log": (sympy.log, range(1, 2)),
    "sqrt": (sympy.sqrt, range(1, 2)),
    "abs": (absolute, range(1, 2)),
    "floor": (floor, range(1, 2)),
    "min": (minimum, range(2, 9)),
    "max": (maximum, range(2, 9)),
    "where": (Where, range(3, 4)),
}
OPERATORS: dict[type[ast.AST], Function] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Floor(a / b),
    ast.Mod: lambda a, b: a - b * Floor(a / b),
}
COMPARISONS: dict[type[ast.AST], Function] = {
    ast.Lt: sympy.StrictLessThan,
    ast.LtE: sympy.LessThan,
    ast.Gt: sympy.StrictGreaterThan,
    ast.GtE: sympy.GreaterThan,
    ast.Eq: sympy.Equality,
    ast.NotEq: sympy.Unequality,
}
LOGIC: dict[type[ast.AST], Function] = {ast.BitAnd: sympy.And, ast.BitOr: sympy.Or}


def is_factor(text: str | None, parameters: Sequence[Parameter]) -> bool:
    """Return whether an expression is s times a number that all scores of a head share.

    Args:
        text: its canonical text; None is s.
        parameters: the tensors that it reads.
    """
    if text is None:
        return True
    factor, rest = read("factor", text, parameters).as_independent(SCORE, as_Add=False)
    return bool(rest == SCORE) and not factor.free_symbols & {POSITION, KEY}


def composed(name: str, outer: str | None, inner: str | None, parameters: Sequence[Parameter]) -> str | None:
    """Return the canonical text of an expression whose score is another expression's value; None is s.

    Args:
        name: the option that the result stands for, for errors.
        outer, inner: canonical texts; None is s.
        parameters: the tensors that they read.

    Raises:
        SpecError: the result is too long.
    """
    if outer is None or inner is None:
        return inner if outer is None else outer
    expr = read("outer", outer, parameters).xreplace({SCORE: read("inner", inner, parameters)})
    return settled(f"{name} of the expression before it", expr, parameters)


def settled(name: str, expr: Expr, parameters: Sequence[Parameter]) -> str | None:
    """Return the text of an expression that stays when it is read and written again; None for ``s``
    itself. If texts turn into each other, it is the least of them.

    Python groups the factors of a product from the left, and sympy multiplies a number and a sum:
    ``-(h + 1)*log(2)`` is read as ``(-h - 1)*log(2)``.
    """
    texts: list[str] = []
    while (text := write(expr)) not in texts:
        texts.append(text)
        expr = read(name, text, parameters)
    return None if expr == SCORE else min(texts[texts.index(text) :])


def read(
    name: str,
    text: str,
    parameters: Sequence[Parameter] = (),
    distances: tuple[float, float] | None = None,
) -> Expr:
    """Return the expression of a text.

    Args:
        name: the option that holds the text, for errors.
        text: Python arithmetic in the names s (the score), i (the query's position), j (the key) and h
            (the head of the queries), entries of parameters such as ``table[h, i - j]``, with the
            functions :data:`FUNCTIONS`.
        parameters: the tensors that the text may read.
        distances: the range of i - j, by which indices are checked; None checks no ranges.

    Raises:
        SpecError: the text is not in the language. The message marks the place.
    """
    expr = _translated(_Reader(name, text.strip(), parameters, distances).number, name, text)
    if expr.diff(SCORE).has(sympy.Derivative, sympy.Subs):
        raise SpecError(explain(name, text, "has no derivative in s that can be written", "floor, // and % without s"))
    return expr


def read_condition(name: str, text: str, parameters: Sequence[Parameter] = ()) -> Boolean:
    """Return the condition of a text, in places and in parameters whose entries are integers.

    Args:
        name: the option that holds the text, for errors.
        text: comparisons of integers, joined by ``&``, ``|`` and ``~``; the names are those of :func:`read`.
        parameters: the tensors that the text may read.

    Raises:
        SpecError: the text is not in the language. The message marks the place.
    """
    reader = _Reader(name, text.strip(), parameters, _ANY_DISTANCE, has_integers=True)
    return _translated(reader.condition, name, text)


def _translated(translate: Callable[[ast.expr], Any], name: str, text: str) -> Any:
    """Return what a reader makes of a text.

    Raises:
        SpecError: the text is too long, nests too deeply, or is not Python.
    """
    if len(text) > LONGEST:
        raise SpecError(explain(name, text, f"has {len(text):,} characters", f"at most {LONGEST:,}"))
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if _depth(tree) > DEEPEST:
            raise RecursionError
        return translate(tree)
    except SyntaxError as error:
        raise SpecError(explain(name, text, f"is no expression: {error.msg}", "such as 50 * tanh(s / 50)")) from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(explain(name, text, "is nested too deeply", "fewer parentheses")) from None


def write(expr: Value) -> str:
    """Return the text of an expression or condition; :func:`read` and :func:`read_condition` invert it."""
    return str(_Writer().doprint(expr))


@lru_cache(maxsize=1024)
def names_in(text: str, parameters: tuple[Parameter, ...] = ()) -> frozenset[str]:
    """Return the names that a canonical text reads: s, i, j, h, b and parameters."""
    return frozenset(str(symbol) for symbol in read("text", text, parameters).free_symbols)


def is_of_distance(text: str, parameters: Sequence[Parameter] = ()) -> bool:
    """Return whether a canonical text reads positions and keys as differences i - j only."""
    expr, shift = read("text", text, parameters), sympy.Dummy(integer=True)
    moved = expr.subs({POSITION: POSITION + shift, KEY: KEY + shift}, simultaneous=True)
    return bool(sympy.expand(moved - expr) == 0)


def counts_heads(text: str, parameters: Sequence[Parameter] = ()) -> bool:
    """Return whether a canonical text reads h otherwise than as the index of an axis h of a parameter."""
    expr, axes = read("text", text, parameters), {parameter.name: parameter.axes for parameter in parameters}

    def without_heads(load: Load) -> Expr:
        indices = zip(load.indices, axes[load.parameter], strict=True)
        return Load(load.args[0], *(sympy.Integer(0) if axis == str(HEAD) else index for index, axis in indices))

    return bool(expr.xreplace({load: without_heads(load) for load in expr.atoms(Load)}).has(HEAD))


def split_sum(expr: Expr) -> tuple[Rational, Expr, list[Expr]]:
    """Return a number, an integer and other terms: the sum is the number times the integer, plus the others.

    Sympy multiplies a sum out, so ``(i - j) / 10`` becomes ``i/10 - j/10``, whose terms round by
    themselves.
    """
    integers: list[Expr] = []
    others: list[Expr] = []
    for term in sympy.Add.make_args(expr):
        whole = term.as_coeff_Mul()[1]
        (integers if whole.is_integer else others).append(term)
    if not any(term.free_symbols for term in integers):
        return Integer(1), Integer(0), [*others, *integers]
    number, integer = sympy.Add(*integers).primitive()
    if integer.could_extract_minus_sign():
        number, integer = -number, -integer
    return number, integer, others


def load_entry(parameter: Parameter, indices: Sequence[Any], *, is_integer: bool) -> Expr:
    """Return an entry of a parameter, whose entries are integers or real numbers."""
    symbol = sympy.Symbol(parameter.name, integer=True) if is_integer else sympy.Symbol(parameter.name, real=True)
    return Load(symbol, *indices)


def rational(number: float) -> Rational:
    """Return a decimal number as the fraction that its digits say."""
    return Rational(Fraction(repr(number)))


def _depth(node: ast.expr) -> int:
    """Return how deep a tree is; operators in a row, such as those of a sum, are one step."""
    row = node.left if isinstance(node, ast.BinOp) else None
    depths = [
        _depth(child) + (0 if child is row else 1)
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.expr)
    ]
    return max(depths, default=0)


def _compared(comparison: Function, first: Expr, second: Expr) -> Boolean:
    """Return a comparison. If it is one of integers, it has a number on the right, and equal ones read alike."""
    if not (first.is_integer and second.is_integer):
        return comparison(first, second)
    number, rest = (first - second).expand().as_coeff_Add()
    compared = comparison(rest, -number)
    return compared.reversedsign if compared.is_Relational and rest.could_extract_minus_sign() else compared


class _Reader:
    """Translates the nodes of a parsed text.

    Args:
        has_integers: whether entries of parameters are integers.
    """

    def __init__(
        self,
        name: str,
        text: str,
        parameters: Sequence[Parameter],
        distances: tuple[float, float] | None,
        *,
        has_integers: bool = False,
    ) -> None:
        self.name, self.text, self.distances, self.has_integers = name, text, distances, has_integers
        self.parameters = {parameter.name: parameter for parameter in parameters}

    def number(self, node: ast.expr) -> Expr:
        """Return the expression of a node that is a number."""
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._checked(node, rational(value) if math.isfinite(value) else sympy.oo)
            case ast.Name(id=name) if name in NAMES:
                return NAMES[name]
            case ast.Name(id=name) if name in self.parameters:
                return self._entry(node, self.parameters[name], [])
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name in self.parameters:
                indices = index.elts if isinstance(index, ast.Tuple) else [index]
                return self._entry(node, self.parameters[name], indices)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.number(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.number(operand)
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
                return self._power(node, self.number(base), self.number(exponent))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
                return self._checked(node, OPERATORS[type(operator)](self.number(left), self.number(right)))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
                return self._call(node, name, arguments)
        raise self._unknown(node)

    def condition(self, node: ast.expr) -> Boolean:
        """Return the expression of a node that is a condition."""
        match node:
            case ast.Compare(left=left, ops=operators, comparators=others) if all(
                type(operator) in COMPARISONS for operator in operators
            ):
                values = [self.number(value) for value in (left, *others)]
                compared = zip(operators, values, values[1:], strict=False)
                return sympy.And(*(_compared(COMPARISONS[type(operator)], a, b) for operator, a, b in compared))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in LOGIC:
                return LOGIC[type(operator)](self.condition(left), self.condition(right))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return sympy.Not(self.condition(operand))
        raise self._error(node, "is no condition", "comparisons such as i - j < 64, joined by & and |, or ~ of one")

    def _call(self, node: ast.Call, name: str, arguments: list[ast.expr]) -> Expr:
        function, numbers = FUNCTIONS[name]
        if len(arguments) not in numbers:
            counts = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            raise self._error(node, f"{name} has {len(arguments)} arguments", f"{counts} arguments")
        if name == "where":
            condition, *rest = arguments
            return self._checked(node, Where(self.condition(condition), *map(self.number, rest)))
        return self._checked(node, function(*map(self.number, arguments)))

    def _entry(self, node: ast.expr, parameter: Parameter, indices: list[ast.expr]) -> Expr:
        """Return an entry of a parameter after checking its indices."""
        if len(indices) != len(parameter.axes):
            rule = f"{parameter.name} has {len(parameter.axes)} axes and {len(indices)} indices"
            raise self._error(node, rule, f"an index for each of the axes {parameter.text or 'none'}")
        places = [self._index(*each) for each in zip(indices, parameter.axes, strict=True)]
        return load_entry(parameter, places, is_integer=self.has_integers)

    def _index(self, node: ast.expr, axis: str | int) -> Expr:
        """Return the index of an axis after checking that it cannot leave the axis."""
        if size := block_size(axis):
            index = self.number(node)
            if index in (Floor(POSITION / size), Floor(KEY / size)):
                return index
            raise self._error(node, f"the axis {axis} of a parameter has its own index", f"i // {size} or j // {size}")
        if isinstance(axis, str):
            legal = " or ".join("ij" if axis in "ij" else axis)
            if not (isinstance(node, ast.Name) and node.id in legal.split(" or ")):
                raise self._error(node, f"the axis {axis} of a parameter has its own index", legal)
            return {**NAMES, str(ENTRY): ENTRY}[node.id]
        index = self.number(node)
        if not index.is_integer or index.has(SCORE):
            raise self._error(node, "is no index", "integers of places, such as min(64, i - j)")
        if index.has(Load):
            raise self._error(node, "an index reads a parameter", "integers of places, such as min(64, i - j)")
        if self.distances is not None:
            from .ranges import range_of  # imported here, because it reads this module

            low, high = range_of(index, self.distances)
            if low < 0 or high >= axis:
                rule = f"the index may be from {low:g} to {high:g}, and the axis has {axis} entries"
                raise self._error(node, rule, f"indices from 0 to {axis - 1}, such as max(0, min({axis - 1}, i - j))")
        return index

    def _power(self, node: ast.expr, base: Expr, exponent: Expr) -> Expr:
        if not (exponent.is_Integer and abs(exponent) <= LARGEST_POWER):
            legal = f"whole numbers from -{LARGEST_POWER} to {LARGEST_POWER}; exp(x * log(y)) is y to the power of x"
            raise self._error(node, "has no such exponent", legal)
        return self._checked(node, base**exponent)

    def _checked(self, node: ast.expr, expr: Expr) -> Expr:
        """Return an expression after checking that its numbers are numbers of fp32."""
        if expr.has(sympy.zoo) and isinstance(node, ast.BinOp):
            raise self._error(node, "divides by zero", "other divisors")
        if expr.is_number and not (expr.is_real and abs(expr.evalf()) <= LARGEST):
            raise self._error(node, f"{expr} is no number of fp32", "real numbers up to 2**127")
        if expr.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo, sympy.I):
            raise self._error(node, f"{expr} is no number of fp32", "real numbers up to 2**127")
        for number in expr.atoms(sympy.Rational):
            if abs(number.p) > LARGEST or number.q > LARGEST:
                raise self._error(node, f"{number} is no number of fp32", "numerators and denominators up to 2**127")
        return expr

    def _unknown(self, node: ast.expr) -> SpecError:
        """Return an error for a node that is no number of the language."""
        names = ["i", "j"] if self.has_integers else [*NAMES]
        names += [*(f"{x.name}[{x.text}]" if x.axes else x.name for x in self.parameters.values())]
        legal = f"numbers, {', '.join(names)}, + - * / // % **, {', '.join(FUNCTIONS)}"
        match node:
            case ast.Name(id=name):
                return self._error(node, f"{name} is not a name of the language", legal)
            case ast.Subscript(value=ast.Name(id=name)) if name not in NAMES:
                return self._error(node, f"{name} is not declared by parameters={{'{name}': its axes}}", legal)
            case ast.Call(func=ast.Name(id=name)):
                return self._error(node, f"{name} is not a function of the language", legal)
            case ast.IfExp():
                return self._error(node, "`if` and `else` are not in the language", "where(condition, x, y)")
            case ast.BinOp(op=ast.BitXor()):
                return self._error(node, "`^` is not in the language", "** for powers")
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
                return self._error(node, "& and | bind tighter than comparisons", "parentheses: (i < j) & (j > 3)")
            case ast.Compare() | ast.BoolOp():
                return self._error(node, "a condition stands where a number should", legal)
        return self._error(node, f"{type(node).__name__} is not in the language", legal)

    def _error(self, node: ast.expr, rule: str, legal: str) -> SpecError:
        """Return an error that marks the node in the text."""
        line = self.text.splitlines()[node.lineno - 1]
        first = node.col_offset
        last = node.end_col_offset if node.end_lineno == node.lineno and node.end_col_offset else len(line)
        mark = f"\n  {line}\n  {' ' * first}{'^' * max(1, last - first)}"
        return SpecError(explain(self.name, self.text, rule, legal) + mark)


class _Writer(StrPrinter):  # type: ignore[misc]
    """Writes an expression as a text of the language."""

    def _print_Exp1(self, expr: Expr) -> str:
        return "exp(1)"

    def _print_Pow(self, expr: Expr, rational: bool = False) -> str:
        base, exponent = expr.args
        if exponent.is_Rational and exponent.q == 2 and abs(exponent.p) > 1:
            power = f"sqrt({self._print(base)})**{abs(exponent.p)}"
            return power if exponent > 0 else f"(1/{power})"
        return str(super()._print_Pow(expr, rational))

    def _print_Load(self, expr: Load) -> str:
        return f"{expr.parameter}[{', '.join(map(self._print, expr.indices))}]" if expr.indices else expr.parameter

    def _print_Floor(self, expr: Floor) -> str:
        return f"floor({self._print(expr.args[0])})"

    def _print_Where(self, expr: Where) -> str:
        return f"where({', '.join(map(self._print, expr.args))})"

    def _joined(self, operator: str, expr: Boolean) -> str:
        return f" {operator} ".join(f"({text})" for text in sorted(map(self._print, expr.args)))

    def _print_And(self, expr: sympy.And) -> str:
        return self._joined("&", expr)

    def _print_Or(self, expr: sympy.Or) -> str:
        return self._joined("|", expr)

    def _print_Not(self, expr: sympy.Not) -> str:
        return f"~({self._print(expr.args[0])})"

    def _print_Relational(self, expr: Any) -> str:
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_Minimum(self, expr: Minimum) -> str:
        return f"min({', '.join(map(self._print, expr.args))})"

    def _print_Maximum(self, expr: Maximum) -> str:
        return f"max({', '.join(map(self._print, expr.args))})"
