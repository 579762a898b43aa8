"""Dropout as generated host functions do it, called directly, against PyTorch with :func:`mtagen.dropout_mask`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import problems
import torch
from torch import Tensor

import mtagen
from mtagen.measure.cases import Sizes
from mtagen.measure.judge import eager_op
from mtagen.spec import Spec


def seed_of(number: int) -> Tensor:
    """A seed all of whose 128 bits matter."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=torch.Generator().manual_seed(number))


def failures(module: ModuleType, spec: Spec, sizes: Sizes, p: float) -> list[str]:
    """Results and gradients, also through the log-sum-exp, that break the accuracy rule, a line each."""
    seed = seed_of(int(100 * p))
    ours, eager = operator(module, spec, seed, p), eager_with_dropout(spec, seed, p)
    return problems.failures_through_lse(ours, spec, problems.random(spec, sizes), eager)


def operator(module: ModuleType, spec: Spec, seed: Tensor, p: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The functions of a module as a differentiable op that returns out and the log-sum-exp."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scale: float, *inputs: Tensor) -> tuple[Tensor, ...]:
            ctx.scale, results = scale, module.forward(*inputs, scale, seed, p)
            ctx.save_for_backward(*inputs, *results)
            return results

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
            grads = (grad_out.contiguous(), grad_lse.float().contiguous())
            return None, *module.backward(*grads, *ctx.saved_tensors, ctx.scale, seed, p)

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float, return_lse: bool, **weights: Tensor) -> Any:
        assert return_lse
        return Function.apply(scale, q, k, v, *(weights[name] for name in spec.weight_names))

    return run


def eager_with_dropout(spec: Spec, seed: Tensor, p: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The reference, whose shares are multiplied by the mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float, return_lse: bool, **weights: Tensor) -> Any:
        assert return_lse
        identity = torch.eye(k.shape[2], dtype=v.dtype).expand(*v.shape[:2], -1, -1)  # as values, they show the shares
        shares, lse = eager_op(spec, return_lse=True)(q, k, identity, **weights, scale=scale)
        kept = mtagen.dropout_mask(seed, p, *shares.shape)
        return (shares * kept / (1 - p)) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse

    return run


def assert_masks(module: ModuleType, spec: Spec, heads: int, n_q: int, n_k: int, p: float) -> None:
    """The shares that multiply values, in the forward pass and in the backward pass, are zeros where they should be.

    All scores are 0, so that shares that are not dropped, nor hidden, are not 0. Values of one key each, and gradients
    of one query each, show them.
    """
    width, seed = spec.value_head_dim, seed_of(1)
    problem = problems.random(spec, Sizes(2, heads, heads, n_q, n_k))
    q, k, weights = problem.inputs.q, problem.inputs.k, problem.inputs.weights
    identity = torch.eye(n_k, dtype=q.dtype).expand(2, heads, -1, -1)
    expected = eager_op(spec)(q, k, identity, **weights, scale=0.0).ne(0) & mtagen.dropout_mask(
        seed, p, 2, heads, n_q, n_k
    )

    def columns(n: int, at: int) -> Tensor:
        """(2, heads, n, width), ones in row at + column."""
        return (torch.arange(n)[:, None] == at + torch.arange(width)).to(q.dtype).repeat(2, heads, 1, 1)

    values = [columns(n_k, at) for at in range(0, n_k, width)]
    made = [module.forward(q, k, v, *weights.values(), 0.0, seed, p) for v in values]
    assert torch.equal(torch.cat([out for out, _ in made], -1)[..., :n_k].ne(0), expected)
    (out, lse), no_grad = made[0], torch.zeros(2, heads, n_q)
    grads = [
        module.backward(columns(n_q, at), no_grad, q, k, values[0], *weights.values(), out, lse, 0.0, seed, p)[2]
        for at in range(0, n_q, width)
    ]
    assert torch.equal(torch.cat(grads, -1)[..., :n_q].mT.ne(0), expected)
