"""Print score expressions as C++ and Triton source. Real numbers are floats, in fp32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import sympy
from sympy import Expr, Integer, Rational
from sympy.logic.boolalg import Boolean

from ..expressions.language import Maximum, Minimum, Where, split_sum
from ..expressions.ranges import magnitude
from ..planner.geometry.score import Entry, FastTanh, View

_SUM, _PRODUCT, _ATOM = range(3)  # how tightly a piece of text binds
_SMALL = 2**20  # a number that a difference of places may be moved by in an int32


def c_expression(expr: Expr) -> str:
    """Print a score expression, or the derivative of one, as C++.

    Integer symbols are names of ints, and real symbols names of floats.

    Raises:
        ValueError: a part of the expression is not of the language.
    """
    return _CPrinter().real(expr)


def c_place(expr: Expr) -> str:
    """Print an integer of places as C++."""
    return _CPrinter().integer(expr)


def triton_expression(expr: Expr) -> str:
    """Print a score expression, or the derivative of one, as Triton.

    Integer symbols are names of int32 tensors, and real symbols names of fp32 tensors or numbers.

    Raises:
        ValueError: a part of the expression is not of the language.
    """
    return _TritonPrinter().real(expr)


def triton_place(expr: Expr) -> str:
    """Print an integer of places as Triton."""
    return _TritonPrinter().integer(expr)


def triton_condition(condition: Boolean) -> str:
    """Print a condition of integers of places and of entries of parameters as Triton."""
    return _TritonConditionPrinter().condition(condition)


def triton_wide(expr: Expr) -> str:
    """Print an integer of places and of entries of parameters as Triton, which computes it in 64 bits.

    Symbols are names of int64 tensors. The text may be a term of a sum.
    """
    return _TritonWidePrinter().integer(expr, _PRODUCT)


def triton_view(view: View, packed: bool, tokens: str = "all_tokens") -> str:
    """Print the address of what a head of a sequence reads of a parameter, as Triton.

    Args:
        view: what is read.
        packed: whether documents are packed.
        tokens: number of tokens of all sequences.
    """
    place = _place_of_view(view, packed, "entry", "own", "n_heads")
    wide = [f"({place}).to(tl.int64)"] if place else []
    wide += [f"tl.cdiv({tokens}, {size})" for size in view.parameter.blocks] if place else []
    return _address(view, packed, f"{view.argument}_ptr", wide, tokens, "first_key")


def c_view(view: View, packed: bool) -> str:
    """Print the address of what a head of a sequence reads of a parameter, as C++.

    ``head`` may be a head that does not exist. It then reads what the last head reads.
    """
    place = _place_of_view(view, packed, "x.entry", "min(head, x.heads - 1)", "x.heads")
    wide = [f"static_cast<long long>({place})"] if place else []
    return _address(view, packed, f"x.{view.argument}", wide, "x.all_tokens", "x.first_key")


def _place_of_view(view: View, packed: bool, entry: str, head: str, n_heads: str) -> str:
    """Return the number of a view among all views of a parameter, or nothing if there is one."""
    if not view.has_entries or (packed and view.token_axes):
        return head if view.has_heads else ""
    return f"{entry} * {n_heads} + {head}" if view.has_heads else entry


def _address(view: View, packed: bool, begin: str, place: list[str], tokens: str, first_key: str) -> str:
    """Return the sum of where a parameter begins, where the view does in it, and its document's first key."""
    size = [str(view.table)] * (view.table > 1) + [tokens] * view.token_axes
    first = [first_key] * (packed and view.token_axes > 0)
    return " + ".join([begin, *([" * ".join([*place, *size])] if place else []), *first])


class _Printer(ABC):
    """Prints an expression in a language, whose words a subclass knows."""

    functions: ClassVar[Mapping[type[Expr], str]]  # of one number
    logic: ClassVar[Mapping[type[Boolean], str]]
    no: ClassVar[str]
    divides: ClassVar[str]  # of integers
    integer_extremum: ClassVar[Mapping[str, str]] = {}  # functions of two integers of equal types

    @abstractmethod
    def number(self, value: float) -> str:
        """Print a real number."""

    @abstractmethod
    def extremum(self, name: str, first: str, second: str) -> str:
        """Print the ``min`` or ``max`` of two numbers, which keeps NaN."""

    @abstractmethod
    def choice(self, condition: str, value: str, other: str) -> str:
        """Print a number that depends on a condition, as an atom."""

    @abstractmethod
    def floor(self, value: str) -> str:
        """Print the largest int that is not larger than a real number."""

    @abstractmethod
    def entry(self, view: str, offset: str) -> str:
        """Print the number in memory at an offset from an address."""

    @abstractmethod
    def wide(self, place: str) -> str:
        """Print an int as one of 64 bits."""

    @abstractmethod
    def as_real(self, integer: str) -> str:
        """Print an integer as a real number."""

    def real(self, expr: Expr, binding: int = _SUM) -> str:
        """Print a real number, in parentheses if it binds less tightly than ``binding``."""
        text, tightness = self._real(expr)
        return text if tightness >= binding else f"({text})"

    def _real(self, expr: Expr) -> tuple[str, int]:
        if expr.is_number:
            value = float(expr)
            return self.number(value), _ATOM if value >= 0 else _SUM
        if isinstance(expr, Where):
            condition, value, other = expr.args
            return self.choice(self.condition(condition), self.real(value, _PRODUCT), self.real(other, _PRODUCT)), _ATOM
        if expr.is_integer:
            return self.as_real(self.integer(expr)), _ATOM
        if expr.is_Symbol:
            return str(expr.name), _ATOM
        if isinstance(expr, Entry):
            view, offset = expr.args
            return self.entry(view.name, self.integer(offset, _ATOM)), _ATOM
        if isinstance(expr, (Minimum, Maximum)):
            return self.extremum(_extremum_name(expr), *map(self.real, expr.args)), _ATOM
        if type(expr) in self.functions:
            return f"{self.functions[type(expr)]}({self.real(expr.args[0])})", _ATOM
        if expr.is_Add:
            return self._sum(expr), _SUM
        if expr.is_Mul or expr.is_Pow:
            return self._product(expr)
        raise ValueError(str(expr))

    def _sum(self, expr: Expr) -> str:
        """Print a sum. Its integers are added up exactly before they are rounded."""
        factor, integers, others = split_sum(expr)
        terms = [
            (_is_negative(term), self.real(-term if _is_negative(term) else term, _PRODUCT))
            for term in sorted(others, key=lambda term: (_is_negative(term), str(term)))
        ]
        if integers != 0:
            text = self.as_real(self.integer(integers))
            scaled = text if abs(factor) == 1 else f"{self.number(float(abs(factor)))} * {text}"
            terms.append((bool(factor < 0), scaled))
        return _added(terms)

    def _product(self, expr: Expr) -> tuple[str, int]:
        """Print a product: its number, quotient and other factors.

        The number and the divisors come first, so that a compiler can compute their quotient once for
        all values of a variable that follows.
        """
        number, rest = expr.as_coeff_Mul()
        if number < 0:
            return f"-{self.real(-expr, _ATOM)}", _SUM
        above: list[str] = []
        below: list[str] = []
        for factor in sympy.Mul.make_args(rest):
            base, exponent = factor.as_base_exp() if not isinstance(factor, sympy.exp) else (factor, Integer(1))
            if not (exponent.is_Rational and (2 * exponent).is_Integer):
                raise ValueError(str(expr))
            (below if exponent < 0 else above).extend(self._power(base, abs(exponent)))
        above.sort()
        text = " / ".join([self.number(float(number)), *below]) if below or number != 1 else ""
        return " * ".join([*([text] if text else []), *above]), _PRODUCT if below or text or len(above) > 1 else _ATOM

    def _power(self, base: Expr, exponent: Rational) -> list[str]:
        """Print the factors of a power: copies of the base, and its root."""
        whole, half = divmod(int(2 * exponent), 2)
        root = [f"{self.functions[sympy.sqrt]}({self.real(base)})"] if half else []
        return [self.real(base, _ATOM)] * whole + root

    def integer(self, expr: Expr, binding: int = _SUM) -> str:
        """Print an integer. It has 64 bits where 32 may not hold it."""
        text, tightness = self._integer(expr, self.fits(expr))
        return text if tightness >= binding else f"({text})"

    def offset(self, expr: Expr) -> str:
        """Print how many numbers of a view are before an entry."""
        return self.integer(expr, _ATOM)

    def fits(self, expr: Expr) -> bool:
        """Return whether an int32 holds an integer, and all integers that it is computed from."""
        return _fits(expr)

    def _integer(self, expr: Expr, fits: bool) -> tuple[str, int]:
        def part(x: Expr, binding: int = _SUM) -> str:
            text, tightness = self._integer(x, fits)
            return text if tightness >= binding else f"({text})"

        if expr.is_Integer:
            return str(expr), _ATOM if expr >= 0 else _SUM
        if expr.is_Symbol:
            return (str(expr.name) if fits else self.wide(str(expr.name))), _ATOM
        if isinstance(expr, Entry):
            view, offset = expr.args
            entry = self.entry(view.name, self.offset(offset))
            return (entry if fits else self.wide(entry)), _ATOM
        if isinstance(expr, Where):
            condition, value, other = expr.args
            return self.choice(self.condition(condition), part(value, _PRODUCT), part(other, _PRODUCT)), _ATOM
        if isinstance(expr, (Minimum, Maximum)):
            first, second = expr.args
            if self.integer_extremum:
                name = self.integer_extremum[_extremum_name(expr)]
                return f"{name}({part(first)}, {part(second)})", _ATOM
            beats = f"{part(first, _PRODUCT)} {'<' if isinstance(expr, Minimum) else '>'} {part(second, _PRODUCT)}"
            return self.choice(beats, part(first, _PRODUCT), part(second, _PRODUCT)), _ATOM
        if isinstance(expr, sympy.floor):
            if not _is_quotient(expr):
                return self.floor(self.real(expr.args[0])), _ATOM
            numerator, divisor = sympy.fraction(sympy.together(expr.args[0]))
            above, below = part(numerator, _ATOM), part(divisor, _ATOM)
            multiple = f"{above} - ({above} % {below} + {below}) % {below}"  # because kernels divide toward zero
            return f"(({multiple}) {self.divides} {below})", _ATOM
        if expr.is_Add:
            terms = sorted(expr.args, key=lambda term: (term.is_number, _is_negative(term), str(term)))
            signed = ((_is_negative(term), part(-term if _is_negative(term) else term, _PRODUCT)) for term in terms)
            return _added(signed), _SUM
        if expr.is_Mul and _is_negative(expr):
            return f"-{part(-expr, _ATOM)}", _SUM
        if expr.is_Mul or expr.is_Pow:
            factors = [
                part(base, _ATOM)
                for base, exponent in (factor.as_base_exp() for factor in sympy.Mul.make_args(expr))
                for _ in range(int(exponent))
            ]
            return " * ".join(factors), _PRODUCT
        raise ValueError(str(expr))

    def condition(self, expr: Boolean) -> str:
        """Print a condition."""
        if type(expr) in self.logic:
            return f" {self.logic[type(expr)]} ".join(f"({text})" for text in sorted(map(self.condition, expr.args)))
        if isinstance(expr, sympy.Not):
            return f"{self.no}({self.condition(expr.args[0])})"
        first, second = expr.args
        if first.is_integer and second.is_integer:
            return f"{self.integer(first, _PRODUCT)} {expr.rel_op} {self.integer(second, _PRODUCT)}"
        return f"{self.real(first, _PRODUCT)} {expr.rel_op} {self.real(second, _PRODUCT)}"


class _CPrinter(_Printer):
    functions: ClassVar[Mapping[type[Expr], str]] = {
        sympy.tanh: "tanh_of",
        FastTanh: "tanh_fast",
        sympy.exp: "exp_of",
        sympy.log: "logf",
        sympy.sqrt: "sqrtf",
    }
    logic: ClassVar[Mapping[type[Boolean], str]] = {sympy.And: "&&", sympy.Or: "||"}
    no: ClassVar[str] = "!"
    divides: ClassVar[str] = "/"

    def number(self, value: float) -> str:
        text = repr(value)
        return f"{text.removesuffix('0') if text.endswith('.0') else text}f"

    def extremum(self, name: str, first: str, second: str) -> str:
        return f"{name}_of({first}, {second})"

    def choice(self, condition: str, value: str, other: str) -> str:
        return f"({condition} ? {value} : {other})"

    def floor(self, value: str) -> str:
        return f"static_cast<int>(floorf({value}))"

    def entry(self, view: str, offset: str) -> str:
        return f"__ldg({view} + {offset})"

    def wide(self, place: str) -> str:
        return f"static_cast<long long>({place})"

    def as_real(self, integer: str) -> str:
        return f"static_cast<float>({integer})"


class _TritonPrinter(_Printer):
    functions: ClassVar[Mapping[type[Expr], str]] = {
        sympy.tanh: "_tanh",
        sympy.exp: "tl.exp",
        sympy.log: "tl.log",
        sympy.sqrt: "tl.sqrt",
    }
    logic: ClassVar[Mapping[type[Boolean], str]] = {sympy.And: "&", sympy.Or: "|"}
    no: ClassVar[str] = "~"
    divides: ClassVar[str] = "//"
    integer_extremum: ClassVar[Mapping[str, str]] = {"min": "tl.minimum", "max": "tl.maximum"}

    def number(self, value: float) -> str:
        return repr(value)

    def extremum(self, name: str, first: str, second: str) -> str:
        return f"tl.{name}imum({first}, {second}, propagate_nan=tl.PropagateNan.ALL)"

    def choice(self, condition: str, value: str, other: str) -> str:
        return f"tl.where({condition}, {value}, {other})"

    def floor(self, value: str) -> str:
        return f"tl.floor({value}).to(tl.int32)"

    def entry(self, view: str, offset: str) -> str:
        return f"tl.load({view} + {offset})"

    def wide(self, place: str) -> str:
        return f"{place}.to(tl.int64)"

    def as_real(self, integer: str) -> str:
        return f"({integer}).to(tl.float32)"


class _TritonWidePrinter(_TritonPrinter):
    """Prints integers of 64 bits, as PyTorch computes the bounds of a mask."""

    def fits(self, expr: Expr) -> bool:
        return False

    def choice(self, condition: str, value: str, other: str) -> str:
        return self.wide(super().choice(condition, value, other))

    def _integer(self, expr: Expr, fits: bool) -> tuple[str, int]:
        return (str(expr.name), _ATOM) if expr.is_Symbol else super()._integer(expr, fits)


class _TritonConditionPrinter(_TritonPrinter):
    """Prints the condition of a mask, whose places and entries are known to be in 32 bits."""

    def fits(self, expr: Expr) -> bool:
        return isinstance(expr, Entry) or magnitude(expr) < 2**31

    def offset(self, expr: Expr) -> str:
        text, tightness = self._integer(expr, fits=True)  # calls check that views have less than 2**31 entries
        return text if tightness == _ATOM else f"({text})"

    def condition(self, expr: Boolean) -> str:
        """Print a condition; of a comparison each side has the terms that it adds."""
        if not expr.is_Relational:
            return super().condition(expr)
        difference = (expr.lhs - expr.rhs).expand().replace(lambda part: part.is_Add, _with_remainders)
        terms = sympy.Add.make_args(difference)
        sides = (
            sympy.Add(*(term for term in terms if not _is_negative(term))),
            sympy.Add(*(-term for term in terms if _is_negative(term))),
        )
        return f" {expr.rel_op} ".join(self.integer(side, _PRODUCT) for side in sides)

    def _integer(self, expr: Expr, fits: bool) -> tuple[str, int]:
        if not isinstance(expr, sympy.Mod):
            return super()._integer(expr, fits)
        text, tightness = self._integer(expr.args[0], fits)
        number, divisor = text if tightness == _ATOM else f"({text})", expr.args[1]
        return f"(({number} % {divisor} + {divisor}) % {divisor})", _ATOM  # because kernels divide toward zero


def _with_remainders(expr: Expr) -> Expr:
    """Return an integer with remainders in place of numbers less their quotients times the divisor."""
    for floor in sorted(expr.atoms(sympy.floor), key=sympy.default_sort_key):
        number, divisor = sympy.fraction(sympy.together(floor.args[0]))
        times = -expr.coeff(floor) / divisor
        if not times.is_Integer or times == 0:
            continue
        rest = (expr + times * (divisor * floor - number)).expand()
        if _terms(rest) <= _terms(expr) - 2:
            expr = rest + times * sympy.Mod(number, divisor, evaluate=False)
    return expr


def _terms(expr: Expr) -> int:
    """Return the number of terms of a sum besides a number."""
    return sum(not term.is_number for term in sympy.Add.make_args(expr))


def _fits(expr: Expr) -> bool:
    """Return whether an int32 holds an integer of places: the difference of two, or one, moved by a small number."""
    if isinstance(expr, (Minimum, Maximum, Where)):
        return all(map(_fits, expr.args[-2:]))
    terms = sympy.Add.make_args(expr)
    numbers = [abs(term) for term in terms if term.is_number]
    added, subtracted = sum(map(_is_place, terms)), sum(_is_place(-term) for term in terms)
    only_places = added + subtracted + len(numbers) == len(terms)
    return only_places and max(added, subtracted) <= 1 and all(number <= _SMALL for number in numbers)


def _is_place(term: Expr) -> bool:
    """Return whether an integer is a place, or the floor of a real number, which kernels compute as an int32."""
    return bool(term.is_Symbol) or (isinstance(term, sympy.floor) and not _is_quotient(term))


def _is_quotient(term: Expr) -> bool:
    """Return whether a floor is that of a quotient of integers."""
    return all(part.is_integer for part in sympy.fraction(sympy.together(term.args[0])))


def _added(terms: Iterable[tuple[bool, str]]) -> str:
    """Return the text of a sum, given whether each term is negative, and its text without the sign."""
    (negative, text), *rest = terms
    head = f"-{text}" if negative else text
    return head + "".join(f" {'-' if negative else '+'} {text}" for negative, text in rest)


def _extremum_name(expr: Expr) -> str:
    return "min" if isinstance(expr, Minimum) else "max"


def _is_negative(term: Expr) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)
