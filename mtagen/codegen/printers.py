"""Print exact integer sympy expressions as Triton, Python or C source that reads as if handwritten.

Only integers, real symbols, sums, products, Min, Max and floor or ceiling of a quotient can be printed;
anything else (a float, a true division) raises. Terms come in a fixed order, so the same expression always
gives the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import sympy
from sympy import Expr, Max, Min, Symbol, ceiling, floor

from ..errors import explain

_SUM, _PRODUCT, _ATOM = range(3)  # how tightly a piece of text binds


def triton_code(expr: Expr | int) -> str:
    """Print ``expr`` as a Triton expression: ``tl.minimum``, ``tl.maximum``, ``//`` and
    ``tl.cdiv``.

    Triton divides ints as C does, toward zero, so a numerator must be provably non-negative. Clip
    it with ``Max(0, ...)``.

    Raises:
        ValueError: a part of ``expr`` has no exact Triton form.
    """
    return _TritonPrinter().text(sympy.sympify(expr))


def python_code(expr: Expr | int) -> str:
    """Print ``expr`` as a Python expression over ints: ``min``, ``max``, ``a // b`` and ``-(-a //
    b)``.

    Raises:
        ValueError: a part of ``expr`` has no exact Python form.
    """
    return _PythonPrinter().text(sympy.sympify(expr))


def triton_host_code(expr: Expr | int) -> str:
    """Print ``expr`` as a Python expression over ints that uses ``triton.cdiv`` for ceilings.

    Raises:
        ValueError: a part of ``expr`` has no exact Python form.
    """
    return _TritonHostPrinter().text(sympy.sympify(expr))


def c_code(expr: Expr | int) -> str:
    """Print ``expr`` as a C expression over ints: ``min``, ``max``, ``a / b`` and ``(a + b - 1) /
    b``.

    C divides toward zero, so a numerator must be provably non-negative.

    Raises:
        ValueError: a part of ``expr`` has no exact C form.
    """
    return _CPrinter().text(sympy.sympify(expr))


class Source(Symbol):  # type: ignore[misc]
    """A symbol whose name is a piece of source: an integer expression that binds like a sum."""

    def __new__(cls, text: str) -> Source:
        symbol: Source = super().__new__(cls, text, integer=True)
        return symbol


class _PythonPrinter:
    def text(self, expr: Expr, binding: int = _SUM) -> str:
        """Print ``expr``, in parentheses if it binds less tightly than ``binding``."""
        code, tightness = self._visit(expr)
        return code if tightness >= binding else f"({code})"

    def _visit(self, expr: Expr) -> tuple[str, int]:
        if expr.is_Integer:
            return str(expr), _ATOM if expr >= 0 else _SUM
        if expr.is_Symbol and expr.is_real and expr.name.isidentifier():
            return str(expr.name), _ATOM
        if isinstance(expr, Source):
            return str(expr.name), _SUM
        if isinstance(expr, Min):
            return self._extremum("min", self._sorted(expr.args)), _ATOM
        if isinstance(expr, Max):
            return self._extremum("max", self._sorted(expr.args)), _ATOM
        if isinstance(expr, floor):
            return self._floor(*self._quotient(expr)), _PRODUCT
        if isinstance(expr, ceiling):
            return self._ceiling(*self._quotient(expr))
        if expr.is_Add:
            return self._add(expr), _SUM
        if expr.is_Mul and _is_negative(expr):
            return f"-{self.text(-expr, _ATOM)}", _SUM
        if expr.is_Mul or expr.is_Pow:
            return self._multiply(expr), _PRODUCT
        raise _unprintable(expr, "has no exact integer form")

    def _extremum(self, name: str, args: Sequence[str]) -> str:
        return f"{name}({', '.join(args)})"

    def _floor(self, numerator: Expr, denominator: Expr) -> str:
        return f"{self.text(numerator, _PRODUCT)} // {self.text(denominator, _ATOM)}"

    def _ceiling(self, numerator: Expr, denominator: Expr) -> tuple[str, int]:
        return f"-(-{self.text(numerator, _ATOM)} // {self.text(denominator, _ATOM)})", _PRODUCT

    def _quotient(self, rounded: Expr) -> tuple[Expr, Expr]:
        numerator, denominator = sympy.fraction(sympy.together(rounded.args[0]))
        if not (numerator.is_integer and denominator.is_integer and denominator.is_positive):
            raise _unprintable(rounded, "is not an integer over a positive integer")
        return numerator, denominator

    def _add(self, expr: Expr) -> str:
        """Print a sum: positive terms first, numbers last among terms of their sign."""
        negative = {term: _is_negative(term) for term in expr.args}
        printed = {term: self.text(-term if negative[term] else term, _PRODUCT) for term in expr.args}
        first, *rest = sorted(expr.args, key=lambda term: (negative[term], term.is_number, printed[term].swapcase()))
        head = self.text(first) if negative[first] else printed[first]
        return head + "".join(f" {'-' if negative[term] else '+'} {printed[term]}" for term in rest)

    def _multiply(self, expr: Expr) -> str:
        """Print a product: quotients first, so that ``x // B * B`` needs no parentheses, then
        numbers, symbols.
        """
        factors: list[Expr] = []
        for factor in sympy.Mul.make_args(expr):
            base, exponent = factor.as_base_exp()
            if not (exponent.is_Integer and exponent > 0):
                raise _unprintable(expr, "divides or takes a root without rounding")
            factors += [base] * int(exponent)
        factors.sort(
            key=lambda factor: (
                not isinstance(factor, (floor, ceiling)),
                not factor.is_number,
                self.text(factor).swapcase(),
            )
        )
        first, *rest = factors
        return " * ".join([self.text(first, _PRODUCT), *(self.text(factor, _ATOM) for factor in rest)])

    def _sorted(self, args: Sequence[Expr]) -> list[str]:
        """Print arguments: numbers, symbols, the rest. swapcase puts ``i0`` before ``BLOCK_M``."""
        ordered = sorted(args, key=lambda arg: (not arg.is_number, not arg.is_Symbol, self.text(arg).swapcase()))
        return [self.text(arg) for arg in ordered]


class _TritonHostPrinter(_PythonPrinter):
    def _ceiling(self, numerator: Expr, denominator: Expr) -> tuple[str, int]:
        return f"triton.cdiv({self.text(numerator)}, {self.text(denominator)})", _ATOM


class _TruncatingPrinter(_PythonPrinter):
    """A printer for languages that divide toward zero and whose extrema take two arguments."""

    _calls: ClassVar[Mapping[str, str]]

    def _extremum(self, name: str, args: Sequence[str]) -> str:
        first, *rest = args
        return f"{self._calls[name]}({first}, {self._extremum(name, rest)})" if rest else first

    def _quotient(self, rounded: Expr) -> tuple[Expr, Expr]:
        numerator, denominator = super()._quotient(rounded)
        if not numerator.is_nonnegative:
            raise _unprintable(rounded, "may have a negative numerator, which is rounded toward zero")
        return numerator, denominator


class _TritonPrinter(_TruncatingPrinter):
    _calls: ClassVar[Mapping[str, str]] = {"min": "tl.minimum", "max": "tl.maximum"}

    def _ceiling(self, numerator: Expr, denominator: Expr) -> tuple[str, int]:
        return f"tl.cdiv({self.text(numerator)}, {self.text(denominator)})", _ATOM


class _CPrinter(_TruncatingPrinter):
    _calls: ClassVar[Mapping[str, str]] = {"min": "min", "max": "max"}

    def _floor(self, numerator: Expr, denominator: Expr) -> str:
        return f"{self.text(numerator, _PRODUCT)} / {self.text(denominator, _ATOM)}"

    def _ceiling(self, numerator: Expr, denominator: Expr) -> tuple[str, int]:
        return self._floor(numerator + denominator - 1, denominator), _PRODUCT


def _is_negative(term: Expr) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


def _unprintable(expr: Expr, rule: str) -> ValueError:
    legal = "integers, real symbols, +, -, *, Min, Max, floor(a/b), ceiling(a/b)"
    return ValueError(explain("expr", str(expr), rule, legal))
