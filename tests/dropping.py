"""Which shares ops drop, held against :func:`mtagen.dropout_mask` bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import problems
import torch
from torch import Tensor

import mtagen
from mtagen.measure.cases import Sizes
from mtagen.measure.judge import eager_op
from mtagen.spec import Spec

SEED = torch.tensor([-0x123456789ABCDEF, 0x7EDCBA9876543210])


def assert_masks(op: Callable[..., Any], spec: Spec, heads: int, n_q: int, n_k: int, p: float) -> None:
    """Which shares multiply values in the forward pass, and which in the backward pass, of two sequences.

    Values of one key each show the former, and gradients of one query each the latter: there are no more keys, and no
    more queries, than a value has elements. All scores are the same, so that seen shares are not 0 by themselves.
    """
    problem = problems.random(spec, Sizes(2, heads, heads, n_q, n_k))
    q, k, v = problem.inputs.q, problem.inputs.k, problem.inputs.v

    def identity(x: Tensor) -> Tensor:
        return torch.eye(*x.shape[2:], dtype=x.dtype).repeat(*x.shape[:2], 1, 1)

    values = identity(v).requires_grad_()
    seen = eager_op(spec)(q, k, values, **problem.inputs.weights, scale=0.0)[..., :n_k].ne(0)
    kept = seen & mtagen.dropout_mask(SEED, p, 2, heads, n_q, n_k)
    out = op(q, k, values, **problem.inputs.weights, scale=0.0, dropout_p=p, dropout_seed=SEED)
    (gradient,) = torch.autograd.grad(out, values, identity(out))
    assert torch.equal(out[..., :n_k].ne(0), kept)
    assert torch.equal(gradient[..., :n_q].mT.ne(0), kept)
