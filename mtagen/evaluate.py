"""Values of score expressions in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, reduce

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor

from .expressions.bounds import seen_by
from .expressions.language import ENTRY, KEY, POSITION, Floor, Load, Maximum, Minimum, Where, split_sum
from .spec import Spec

_FUNCTIONS: dict[type[sympy.Basic], Callable[..., Tensor]] = {
    sympy.tanh: torch.tanh,
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    Minimum: torch.minimum,  # like torch.maximum it keeps NaN
    Maximum: torch.maximum,
    sympy.StrictLessThan: torch.lt,
    sympy.LessThan: torch.le,
    sympy.StrictGreaterThan: torch.gt,
    sympy.GreaterThan: torch.ge,
    sympy.Equality: torch.eq,
    sympy.Unequality: torch.ne,
}
_LOGIC: dict[type[sympy.Basic], Callable[..., Tensor]] = {sympy.And: torch.logical_and, sympy.Or: torch.logical_or}


def evaluate(expr: Expr, values: Mapping[Symbol, Tensor], parameters: Mapping[str, Tensor] = {}) -> Tensor:
    """Return the value of an expression.

    Args:
        expr: an expression of :mod:`.expressions.language`, or the derivative of one.
        values: the value of each symbol, which broadcast; integers in int64, the score in fp32 or fp64. All
            else is computed in the dtype of the score.
        parameters: the tensors that the expression reads. An index that leaves an axis, as those of
            hidden scores may, reads the entry at the axis's end.
    """
    return _Evaluation(values, parameters).real(expr)


def evaluate_integer(expr: Expr, values: Mapping[Symbol, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the value of an integer expression in int64; the arguments are those of :func:`evaluate`."""
    return _Evaluation(values, parameters).of(expr)


def indices_of(load: Load, values: Mapping[Symbol, Tensor], parameter: Tensor) -> tuple[Tensor, ...]:
    """Return the indices of an entry of a parameter, int64, which broadcast to the shape of the scores."""
    evaluation = _Evaluation(values, {})
    extents = zip(load.indices, parameter.shape, strict=True)
    return tuple(evaluation.of(index).clamp(0, extent - 1) for index, extent in extents)


class Bounds:
    """The keys that queries see by the option ``visible``, besides causality and window.

    Args:
        spec: the operator.
        parameters: the tensors that it reads, by name, others too.
    """

    def __init__(self, spec: Spec, parameters: Mapping[str, Tensor]) -> None:
        self._seen = seen_by(spec.visible, spec.parameters)
        self._parameters = parameters

    def hidden(self, positions: Tensor, keys: Tensor, entries: Tensor) -> Tensor | None:
        """Return whether keys are hidden from the queries at some positions, or None if none is.

        Args:
            positions, keys, entries: positions, keys and batch entries, int64, which broadcast.
        """
        if not keys.numel():  # parameters of tokens are empty, too
            return None
        first, last = self.keys(positions, entries)
        hidden = [] if first is None else [keys < first]
        hidden += [] if last is None else [keys > last]
        if self._seen.checked != sympy.true:
            values = {POSITION: positions, KEY: keys, ENTRY: entries}
            hidden.append(~_Evaluation(values, self._parameters).of(self._seen.checked))
        return reduce(torch.logical_or, hidden) if hidden else None

    def keys(self, positions: Tensor, entries: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the first and the last key of the queries at some positions, int64, or None for no bound.

        Args:
            positions, entries: positions and batch entries, int64, which broadcast.
        """
        run = self._seen.run
        first, last = (
            None if bound is None else self._of_queries(bound, positions, entries) for bound in (run.first, run.last)
        )
        return first, last

    def gap(self, positions: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last key of the longest gap between two runs of keys, int64.

        The last key is before the first where there is no gap.

        Args:
            positions, entries: positions and batch entries, int64, which broadcast.
        """
        first, last = torch.zeros_like(positions), torch.full_like(positions, -1)
        for gap in self._seen.gaps:
            begin, end = (self._of_queries(bound, positions, entries).clamp(min=-1) for bound in gap)
            is_longer = end - begin.clamp(min=0) > last - first
            first, last = torch.where(is_longer, begin.clamp(min=0), first), torch.where(is_longer, end, last)
        return first, last

    def _of_queries(self, bound: Expr, positions: Tensor, entries: Tensor) -> Tensor:
        return evaluate_integer(bound, {POSITION: positions, ENTRY: entries}, self._parameters)


@cache
def _is_whole(expr: sympy.Basic) -> bool:
    """Return whether an expression is an integer that is computed from numbers of 64 bits."""
    return bool(expr.is_integer) and all(abs(number) < 2**63 for number in expr.atoms(sympy.Integer))


class _Evaluation:
    """The values of an expression and of its parts."""

    def __init__(self, values: Mapping[Symbol, Tensor], parameters: Mapping[str, Tensor]) -> None:
        self.values, self.parameters = values, parameters
        # A bound has no real numbers.
        (self.dtype,) = {value.dtype for value in values.values() if value.is_floating_point()} or {torch.float64}
        (self.device,) = {value.device for value in values.values()}
        self.known: dict[sympy.Basic, Tensor] = {}

    def real(self, expr: Expr) -> Tensor:
        """Return the value of an expression in the dtype of the score."""
        return self.of(expr).to(self.dtype)

    def of(self, expr: sympy.Basic) -> Tensor:
        """Return the value of an expression or condition: in int64 if it is an integer."""
        if expr not in self.known:
            self.known[expr] = self._computed(expr)
        return self.known[expr]

    def _computed(self, expr: sympy.Basic) -> Tensor:
        if expr in self.values:
            return self.values[expr]
        if expr.is_number or expr in (sympy.true, sympy.false):
            return self._constant(expr)
        if isinstance(expr, Load):
            parameter = self.parameters[expr.parameter]
            entry = parameter[indices_of(expr, self.values, parameter)]
            return entry.to(torch.int64) if expr.is_integer else entry
        if isinstance(expr, Floor):
            return self._floor(expr.args[0])
        if isinstance(expr, (sympy.And, sympy.Or)):
            return reduce(_LOGIC[type(expr)], map(self.of, expr.args))
        if isinstance(expr, sympy.Not):
            return ~self.of(expr.args[0])
        if isinstance(expr, Where):
            number = self.of if _is_whole(expr) else self.real
            condition, value, other = expr.args
            return torch.where(self.of(condition), number(value), number(other))
        if isinstance(expr, sympy.Add):
            return self._sum(expr)
        if isinstance(expr, sympy.Mul):
            return self._product(expr) if _is_whole(expr) else reduce(torch.mul, map(self.real, expr.args))
        if isinstance(expr, (Minimum, Maximum)) and _is_whole(expr):
            return self._integer_extremum(expr)
        if isinstance(expr, sympy.Pow):
            base, exponent = expr.args
            return self.of(base).pow(int(exponent)) if _is_whole(expr) else self.real(base).pow(float(exponent))
        # PyTorch would compute other functions of integers in its default dtype.
        compares_integers = expr.is_Relational and all(map(_is_whole, expr.args))
        return _FUNCTIONS[type(expr)](*map(self.of if compares_integers else self.real, expr.args))

    def _sum(self, expr: Expr) -> Tensor:
        """Return a sum. Its integers are added up exactly before they are rounded."""
        if _is_whole(expr):
            constant, rest = expr.as_coeff_Add()
            total = reduce(torch.add, map(self.of, sympy.Add.make_args(rest)))
            return total + int(constant) if constant else total
        number, integer, others = split_sum(expr)
        rounded = self.real(integer) * float(number)
        return reduce(torch.add, map(self.real, others), rounded)

    # Operations on integers take constants as numbers, each of which would else be a tensor that a kernel fills.

    def _product(self, expr: Expr) -> Tensor:
        factor, rest = expr.as_coeff_Mul()
        product = reduce(torch.mul, map(self.of, sympy.Mul.make_args(rest)))
        return product if factor == 1 else product * int(factor)

    def _integer_extremum(self, expr: Expr) -> Tensor:
        limits = [int(part) for part in expr.args if part.is_Integer]
        extremum = reduce(_FUNCTIONS[type(expr)], (self.of(part) for part in expr.args if not part.is_Integer))
        for limit in limits:
            extremum = extremum.clamp(max=limit) if isinstance(expr, Minimum) else extremum.clamp(min=limit)
        return extremum

    def _constant(self, expr: sympy.Basic) -> Tensor:
        # By a fill: CUDA graphs cannot capture a copy from the host.
        if expr in (sympy.true, sympy.false):
            return torch.full((), bool(expr), device=self.device)
        if expr.is_Integer and _is_whole(expr):
            return torch.full((), int(expr), device=self.device)
        return torch.full((), float(expr), dtype=self.dtype, device=self.device)

    def _floor(self, expr: Expr) -> Tensor:
        """Return the floor of a number: of a quotient of integers exactly."""
        numerator, denominator = sympy.fraction(sympy.together(expr))
        if numerator.is_integer and denominator.is_integer:
            divisor = int(denominator) if denominator.is_Integer else self.of(denominator)
            return torch.div(self.of(numerator), divisor, rounding_mode="floor")
        return self.real(expr).floor().to(torch.int64)
