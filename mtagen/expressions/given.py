"""Expressions as they are given: texts, or functions, which are called once with symbols and become texts."""

from __future__ import annotations

import ast
import inspect
import math
import numbers
from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import sympy
from sympy import Rational

from ..errors import SpecError, explain
from .language import (
    COMPARISONS,
    ENTRY,
    FUNCTIONS,
    LOGIC,
    NAMES,
    OPERATORS,
    Function,
    Value,
    absolute,
    load_entry,
    rational,
    read,
    settled,
    write,
)
from .parameters import Parameter


def canonical(
    name: str,
    given: str | Function | None,
    parameters: Sequence[Parameter] = (),
    distances: tuple[float, float] | None = None,
) -> str | None:
    """Return the text of an expression in a form that equal expressions share; None for ``s`` itself.

    Args:
        name: the option that holds the expression, for errors.
        given: a text; or a function of places and parameters, named as in a text, which is called
            once with symbols; or None.
        parameters: the tensors that the expression may read.
        distances: the range of i - j over the scores that the expression is taken of; None checks no
            indices.

    Raises:
        SpecError: the text is not in the language, or the function returns nothing in it; or an
            index may leave a parameter.
    """
    if given is None:
        return None
    return _canonical(name, text_of(name, given, parameters), tuple(parameters), distances)


@lru_cache(maxsize=1024)  # specs that are equal, or differ in other fields, have the same texts
def _canonical(
    name: str, text: str, parameters: tuple[Parameter, ...], distances: tuple[float, float] | None
) -> str | None:
    return settled(name, read(name, text, parameters, distances), parameters)


def text_of(name: str, given: str | Function, parameters: Sequence[Parameter], *, has_integers: bool = False) -> str:
    """Return the text of an expression or condition: of a function, what it returns for symbols.

    Args:
        name: the option, for errors.
        given: a text or a function.
        parameters: the tensors that it may read.
        has_integers: whether their entries are integers.

    Raises:
        SpecError: ``given`` is no text and no function, or the function cannot be called so.
    """
    return given if isinstance(given, str) else _called(name, given, parameters, has_integers)


class _Term:
    """A number or condition as functions see it. Its operators mean what they mean in texts.

    Sympy's own symbols would not do: ``==`` compares how they are written, and gives True or False.

    Attributes:
        value: the number or condition.
    """

    def __init__(self, value: Value) -> None:
        self.value = value

    def __pow__(self, exponent: Any) -> _Term:
        return _Term(self.value ** _value_of(exponent))

    def __neg__(self) -> _Term:
        return _Term(-self.value)

    def __pos__(self) -> _Term:
        return self

    def __abs__(self) -> _Term:
        return _Term(absolute(self.value))

    def __invert__(self) -> _Term:
        return _Term(sympy.Not(self.value))

    def __bool__(self) -> bool:
        raise TypeError("a condition has no truth value: join conditions by & | ~, and choose numbers by where()")

    def __repr__(self) -> str:
        return write(self.value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"numbers of expressions have no {name}")

    __hash__ = None  # type: ignore[assignment]  # equality is a condition


def _value_of(x: Any) -> Value:
    """Return what a term, or a number of Python's, stands for.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(x, _Term):
        return x.value
    if isinstance(x, bool):
        return sympy.sympify(x)
    if isinstance(x, numbers.Rational):
        return Rational(x.numerator, x.denominator)
    if isinstance(x, numbers.Real) and math.isfinite(x):
        return rational(float(x))
    raise TypeError(f"{x!r} is no number of an expression")


def _on_terms(function: Function) -> Function:
    """Return a function of sympy's numbers and conditions as one of terms."""
    return lambda *values: _Term(function(*map(_value_of, values)))


def _swapped(function: Function) -> Function:
    return lambda second, first: function(first, second)


_NAMES_OF_OPERATORS: dict[type[ast.AST], str] = dict(
    zip((*OPERATORS, *LOGIC), ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or"), strict=True)
)
_NAMES_OF_COMPARISONS: dict[type[ast.AST], str] = dict(
    zip(COMPARISONS, ("lt", "le", "gt", "ge", "eq", "ne"), strict=True)
)


def _add_operators() -> None:
    """Give terms the operators of the language."""
    for kind, name in _NAMES_OF_OPERATORS.items():
        operator = _on_terms((OPERATORS | LOGIC)[kind])
        setattr(_Term, f"__{name}__", operator)
        setattr(_Term, f"__r{name}__", _swapped(operator))
    for kind, name in _NAMES_OF_COMPARISONS.items():
        setattr(_Term, f"__{name}__", _on_terms(COMPARISONS[kind]))


_add_operators()


class _Table:
    """A parameter as functions see it: indexing it gives an entry."""

    def __init__(self, parameter: Parameter, *, is_integer: bool) -> None:
        self.parameter, self.is_integer = parameter, is_integer

    def __getitem__(self, indices: Any) -> _Term:
        places = indices if isinstance(indices, tuple) else (indices,)
        return _Term(load_entry(self.parameter, [*map(_value_of, places)], is_integer=self.is_integer))


def _called(name: str, function: Function, parameters: Sequence[Parameter], has_integers: bool) -> str:
    """Call a function with symbols, and return the text of what it returns.

    Names such as ``min`` and ``max`` in the function mean the functions of the language.
    """
    known: dict[str, Any] = {name: _Term(symbol) for name, symbol in NAMES.items()} | {str(ENTRY): _Term(ENTRY)}
    for parameter in parameters:
        table = _Table(parameter, is_integer=has_integers)
        known[parameter.name] = table if parameter.axes else table[()]
    names = ", ".join(name for name in known if not (has_integers and name in "sh"))
    legal = f"a text, or a function of {names}, and other parameters"
    if not callable(function):
        raise SpecError(explain(name, function, "is no text and no function", legal))
    try:
        arguments = inspect.signature(function).parameters
    except ValueError:
        raise SpecError(explain(name, function, "does not name its arguments", legal)) from None
    if unknown := [argument for argument in arguments if argument not in known]:
        raise SpecError(explain(name, unknown, "are not names of an expression", legal))
    if isinstance(function, FunctionType):
        translated = {name: _on_terms(meaning) for name, (meaning, _) in FUNCTIONS.items()}
        function = FunctionType(
            function.__code__,
            function.__globals__ | translated,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
    try:
        value = function(**{argument: known[argument] for argument in arguments})
        return value if isinstance(value, str) else write(_value_of(value))
    except SpecError:
        raise
    except Exception as error:  # whatever the function does with what it gets
        rule = f"cannot be called with symbols: {type(error).__name__}: {error}"
        functions = f"arithmetic, comparisons joined by & | ~, and the functions {', '.join(FUNCTIONS)}"
        tensors = "tensors are arguments, which parameters= declares"
        raise SpecError(explain(name, function, rule, f"{functions}; {tensors}")) from None
