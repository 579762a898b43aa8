"""The function of scores before the softmax, in PyTorch ops: the planner's ``ScoreStage`` as kernels print it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import sympy
import torch
from sympy import Expr
from torch import Tensor

from ..planner.geometry.score import GRADIENT, HEAD, KEY, POSITION, SCORE, ScoreStage
from ..spec import Spec

_FUNCTIONS = {"tanh": torch.tanh}


class Place(NamedTuple):
    """Where a block of scores ``[G, R, J]`` lies: its heads of queries ``[G]``, first position and first key."""

    heads: Tensor
    position: int
    key: int

    @property
    def corner(self) -> int:
        """The first position minus the first key: i + off - j of the first score."""
        return self.position - self.key


def modify(spec: Spec, scores: Tensor, place: Place) -> Tensor:
    """Return the values of scores that the softmax takes, in a new tensor unless they are the scores."""
    return _evaluate(ScoreStage.of(spec).modify, place, {"score": scores})


def modify_backward(spec: Spec, gradient: Tensor, scores: Tensor, place: Place) -> Tensor:
    """Return the gradient of scores from that of their values; 0 remains 0, even of a score that is no number."""
    result = _evaluate(ScoreStage.of(spec).modify_backward, place, {"gradient": gradient, "score": scores})
    return result if result is gradient else result.masked_fill(gradient == 0, 0)


def _evaluate(expr: Expr, place: Place, values: dict[str, Tensor]) -> Tensor:
    example = values["score"]
    rows, keys = example.shape[1:]
    places: dict[str, Callable[[], Tensor]] = {
        "position": lambda: torch.arange(place.position, place.position + rows, device=example.device)[:, None],
        "key": lambda: torch.arange(place.key, place.key + keys, device=example.device),
        "head": lambda: place.heads[:, None, None],
    }
    names, function = _in_torch(expr)
    arguments = (values[name] if name in values else places[name]() for name in names)
    result: Tensor = function(*arguments)
    return result


@cache
def _in_torch(expr: Expr) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """Return the names of the symbols of an expression, and the function of their values."""
    symbols = [symbol for symbol in (GRADIENT, SCORE, POSITION, KEY, HEAD) if symbol in expr.free_symbols]
    return tuple(symbol.name for symbol in symbols), sympy.lambdify(symbols, expr, modules=[_FUNCTIONS])
