"""A built op against the specification on this machine, by the rule of :mod:`.accuracy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .accuracy import GRADIENT_FACTOR, Comparison, compare
from .dtypes import TORCH_DTYPES
from .errors import SpecError, explain
from .naive import reference
from .spec import Spec


class Op(Protocol):
    """What is used here of the op that ``mtagen.build`` returns."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, return_lse: bool) -> Any: ...

    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor,
        *,
        cache_seqlens: Tensor,
        return_lse: bool,
    ) -> Any: ...


class Case(NamedTuple):
    """Sizes of one problem."""

    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int


CASES = (
    Case(8, 8, 4, 1, 1),  # enough rows that eager is not exact by luck
    Case(2, 2, 2, 67, 67),
    Case(2, 4, 2, 113, 203),  # ragged, grouped queries
    Case(1, 2, 1, 70, 9),  # when causal, most queries see no key
    Case(1, 2, 1, 511, 515),  # many tiles
)


_MIN_WEIGHTS = 16  # whose gradients are compared, or eager's largest error may be small by luck


class Row(NamedTuple):
    """One result of one case, judged."""

    case: Case
    result: str
    comparison: Comparison


class Inputs(NamedTuple):
    """Random tensors: an op's differentiable inputs, the gradient of its output, the queries to decode."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    grad_out: Tensor
    q_tail: Tensor


def check(op: Op, spec: Spec, device: torch.device, cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """Forward, all gradients and decode of ``op`` on random inputs, case by case; for small kernels with more heads.

    Raises:
        SpecError: the dtype is as wide as that of the float64 reference.
    """
    if spec.dtype == "fp64":
        legal = [name for name in TORCH_DTYPES if name != "fp64"]
        raise SpecError(explain("dtype", spec.dtype, "must be narrower than the float64 reference", legal))
    eager = partial(reference, causal=spec.causal, key_padding=spec.key_padding, mask=spec.mask, return_lse=True)
    for case in cases:
        more = math.ceil(_MIN_WEIGHTS / (case.heads * math.prod(spec.kernel)))
        case = case._replace(heads=more * case.heads, kv_heads=more * case.kv_heads)
        inputs = random_inputs(spec, case, device)
        # Let cuDNN use TF32, and eager convolutions in fp32 would be no yardstick.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            results = judge_training(partial(op, return_lse=True), eager, inputs) | _decode(op, eager, inputs)
        for name, comparison in results.items():
            yield Row(case, name, comparison)


def failures(op: Op, spec: Spec, device: torch.device, cases: Sequence[Case] = CASES) -> list[str]:
    """The results of :func:`check` that break the accuracy rule, a line each."""
    return [
        f"{row.case} {row.result}: {row.comparison.error:.3g} > {row.comparison.allowed:.3g}"
        for row in check(op, spec, device, cases)
        if not row.comparison.ok
    ]


def random_inputs(spec: Spec, case: Case, device: torch.device) -> Inputs:
    """Seeded inputs of one case in the dtype of ``spec``, the weight in fp32."""
    random = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, nq, nk = case
    new = min(2, nk)  # tokens to decode

    def rows(n: int, heads: int, dim: int) -> Tensor:
        # Laid out (B, N, H, D), as a projection leaves it.
        x = torch.randn(batch, n, heads, dim, generator=random).transpose(1, 2)
        return x.to(device, TORCH_DTYPES[spec.dtype])

    return Inputs(
        q=rows(nq, heads, spec.head_dim),
        k=rows(nk, kv_heads, spec.head_dim),
        v=rows(nk, kv_heads, spec.value_head_dim),
        weight=torch.randn(heads, *spec.kernel, generator=random).to(device) * math.prod(spec.kernel) ** -0.5,
        grad_out=rows(nq, heads, spec.value_head_dim),
        q_tail=rows(spec.cq - 1 + new, heads, spec.head_dim),
    )


def judge_training(
    function: Callable[..., Any], formula: Callable[..., Any], inputs: Inputs, leaves: int = 4
) -> dict[str, Comparison]:
    """The results of ``function`` and the gradients through its output, against ``formula`` in plain PyTorch.

    Args:
        function: of the first ``leaves`` inputs; returns out, or out and the log-sum-exp.
        formula: the same, which also takes them in float64.
        inputs: of one case.
        leaves: 3 for attention that takes no weight.
    """

    def run(function: Callable[..., Any], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        tensors = [x.to(dtype or x.dtype).detach().requires_grad_() for x in inputs[:leaves]]
        results = function(*tensors)
        out, lse = results if isinstance(results, tuple) else (results, None)
        gradients = torch.autograd.grad(out, tensors, inputs.grad_out.to(out.dtype))
        named = {f"d{name}": gradient for name, gradient in zip(inputs._fields[:leaves], gradients, strict=True)}
        return {"out": out.detach(), **({} if lse is None else {"lse": lse.detach()}), **named}

    ours, eager, exact = run(function), run(formula), run(formula, torch.float64)
    # What cancels in a gradient through softmax is a dot product of unit-normal vectors; in dweight, times a score.
    gradient = partial(compare, factor=GRADIENT_FACTOR, terms=inputs.grad_out.shape[-1] ** 0.5)
    score = (inputs.q.norm(dim=-1).max() * inputs.k.norm(dim=-1).max()).item() * inputs.q.shape[-1] ** -0.5
    rules: dict[str, Callable[..., Comparison]] = {
        "out": partial(compare, terms=inputs.v.abs().max().item()),
        "lse": compare,
        "dq": gradient,
        "dk": gradient,
        "dv": partial(compare, factor=GRADIENT_FACTOR),
        "dweight": partial(compare, factor=GRADIENT_FACTOR, terms=score * inputs.grad_out.shape[-1] ** 0.5),
    }
    return {name: rules[name](ours[name], eager[name], exact[name]) for name in exact}


def _decode(op: Op, eager: Callable[..., Any], inputs: Inputs) -> dict[str, Comparison]:
    q_tail, k, v, weight = inputs.q_tail, inputs.k, inputs.v, inputs.weight
    batch, nk = k.shape[0], k.shape[2]
    new = min(2, nk)
    lengths = torch.tensor([max(new, nk // (i + 1)) for i in range(batch)], dtype=torch.int32)

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Each sequence alone; queries before its first key are left out, for they do not exist."""
        parts = [
            eager(*(x.to(dtype).unsqueeze(0) for x in (tail[:, -n:], keys[:, :n], values[:, :n])), weight)
            for tail, keys, values, n in zip(q_tail, k, v, lengths.tolist(), strict=True)
        ]
        out, lse = (torch.cat([x[:, :, -new:] for x in part]) for part in zip(*parts, strict=True))
        return out, lse

    # Whatever a cache holds past its length must not count.
    stale = (torch.arange(nk) >= lengths[:, None])[:, None, :, None].to(k.device)
    k_cache, v_cache = (x.masked_fill(stale, torch.nan) for x in (k, v))
    ours = op.decode(q_tail, k_cache, v_cache, weight, cache_seqlens=lengths.to(k.device), return_lse=True)
    out, lse = zip(ours, run(q_tail.dtype), run(torch.float64), strict=True)
    return {
        "decode out": compare(*out, terms=v.abs().max().item()),
        "decode lse": compare(*lse),
    }
