"""A function of scores in the place of the identity, for kernels and for the reference alike."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch
from torch import Tensor

from mtagen import eager
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.geometry.score import HEAD, KEY, POSITION, SCORE, ScoreStage
from mtagen.spec import Spec

# It depends on all of its parameters, bends within the range of random scores, and is largest at other keys than they.
MODIFIED = (3 + HEAD) * sympy.tanh(SCORE / 2) - (POSITION - KEY) / sympy.Integer(16)
_modified = sympy.lambdify([SCORE, POSITION, KEY, HEAD], MODIFIED, modules=[{"tanh": torch.tanh}])


def modify_scores(patch: pytest.MonkeyPatch) -> None:
    """From here on, kernels that are rendered and the reference take the softmax of ``MODIFIED``."""
    mix, calls = eager._mix, itertools.count()

    def mixed(x: Tensor, weight: Tensor | None) -> Tensor:
        """The reference mixes twice: scores, which the softmax takes, and then probabilities."""
        x = mix(x, weight)
        if next(calls) % 2:
            return x
        heads, n_q, n_k = x.shape[1:]
        positions, keys = torch.arange(n_k - n_q, n_k)[:, None], torch.arange(n_k)
        result: Tensor = _modified(x, positions, keys, torch.arange(heads)[:, None, None])
        return result.to(x.dtype)

    def of(cls: type[ScoreStage], spec: Spec) -> ScoreStage:
        return cls(Mask.of(spec), MODIFIED)

    patch.setattr(eager, "_mix", mixed)
    patch.setattr(ScoreStage, "of", classmethod(of))
