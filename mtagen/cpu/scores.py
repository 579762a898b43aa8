"""The function of scores before the softmax, in PyTorch ops: the planner's ``ScoreStage`` as kernels print it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sympy import Expr
from torch import Tensor

from ..evaluate import evaluate
from ..planner.geometry.score import GRADIENT, HEAD, KEY, POSITION, SCORE, ScoreStage
from ..spec import Spec


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
    stage = ScoreStage.of(spec)
    return scores if stage.is_identity else _value(stage.modify, scores, scores, place)


def modify_backward(spec: Spec, gradient: Tensor, scores: Tensor, place: Place) -> Tensor:
    """Return the gradient of scores from that of their values."""
    stage = ScoreStage.of(spec)
    return gradient if stage.is_identity else _value(stage.modify_backward, scores, gradient, place)


def _value(expr: Expr, scores: Tensor, gradient: Tensor, place: Place) -> Tensor:
    rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[1:])
    values = {SCORE: scores, GRADIENT: gradient, HEAD: place.heads[:, None, None]}
    values |= {POSITION: rows[:, None] + place.position, KEY: keys + place.key}
    return evaluate(expr, values).expand_as(scores)
